"""Argument checks shared by all operators.

A shape is written as names, e.g. "B K Hq d": the first tensor that uses a name fixes its size,
every later one must agree. All problems of a call are reported together, each with the tensor's
name. Only shapes, dtypes, devices and strides are looked at, never values: reading values would
stop a GPU.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class ArgumentError(ValueError):
    """Arguments of an operator that don't fit together; the message lists every reason."""


@lru_cache(maxsize=256)
def _parsed(shape: str) -> tuple[tuple[str, int], ...]:
    """Each dimension's name and what is added to it: "B K+1" -> (("B", 0), ("K", 1))."""
    parts = (name.partition("+") for name in shape.split())
    return tuple((name, int(more or 0)) for name, _, more in parts)


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


class Checker:
    """Collects the problems of one call.

    Args:
        op: operator name for the message.
        device: where all tensors must be.
    """

    def __init__(self, op: str, device: torch.device):
        self.op = op
        self.device = device
        self.sizes: dict[str, int] = {}
        self.problems: list[str] = []

    def tensor(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: str,
        dtypes: torch.dtype | Sequence[torch.dtype],
        last_contiguous: bool = True,
    ) -> None:
        """Check one tensor's device, dtype, shape and (unless told otherwise) unit last stride."""
        if tensor.dtype is not dtypes:
            allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
            if tensor.dtype not in allowed:
                self.problems.append(
                    f"{name} must be {_dtype_names(allowed)}, not {_dtype_names([tensor.dtype])}"
                )
        if tensor.device != self.device:
            self.problems.append(f"{name} is on {tensor.device}, expected {self.device}")
        self.shape(name, tensor, shape)
        if last_contiguous and tensor.dim() and tensor.stride(-1) != 1 and tensor.size(-1) > 1:
            self.problems.append(
                f"{name} must be contiguous in its last dimension (stride {tensor.stride(-1)})"
            )

    def shape(self, name: str, tensor: torch.Tensor, shape: str) -> None:
        """Check the shape alone; a name that has no size yet gets this tensor's."""
        expected = _parsed(shape)
        actual = tensor.shape
        if len(actual) != len(expected):
            self.problems.append(
                f"{name} has shape {list(actual)}, expected [{', '.join(shape.split())}]"
            )
            return
        for axis, (symbol, more) in enumerate(expected):
            size = self.sizes.setdefault(symbol, actual[axis] - more)
            if size + more != actual[axis]:
                self.problems.append(
                    f"{name} has shape {list(actual)}, expected [{', '.join(shape.split())}] "
                    f"with {shape.split()[axis]} = {size + more} (dimension {axis})"
                )

    def pool(
        self, name: str, pool: torch.Tensor, dtypes: torch.dtype | Sequence[torch.dtype]
    ) -> None:
        """A K or V pool of one layer: [N, Hkv, d], or [pages, P, Hkv, d], any outer strides."""
        shape = "pages P Hkv d" if pool.dim() == 4 else "N Hkv d"
        self.tensor(name, pool, shape, dtypes)

    def pools(
        self,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
        dtypes: torch.dtype | Sequence[torch.dtype],
    ) -> None:
        """One key and one value pool per tapped layer, all of one shape, layout and dtype."""
        if len(key_pools) == 0 or len(key_pools) != len(value_pools):
            self.problems.append(
                "key_pools and value_pools must hold one pool per tapped layer, not "
                f"{len(key_pools)} and {len(value_pools)}"
            )
            return
        layers = self.sizes.setdefault("L", len(key_pools))
        if layers != len(key_pools):
            self.problems.append(f"key_pools holds {len(key_pools)} pools, expected L = {layers}")
        first = key_pools[0]
        for name, pools in (("key_pools", key_pools), ("value_pools", value_pools)):
            for layer, pool in enumerate(pools):
                label = f"{name}[{layer}]"
                self.pool(label, pool, dtypes if pool is first else first.dtype)
                if pool.dim() == first.dim() and pool.stride() != first.stride():
                    self.problems.append(
                        f"{label} has strides {pool.stride()}, expected those of key_pools[0], "
                        f"{first.stride()}"
                    )

    def heads(self) -> None:
        """Query heads must be whole groups of the KV heads."""
        query_heads, kv_heads = self.sizes.get("Hq"), self.sizes.get("Hkv")
        if query_heads is not None and kv_heads is not None:
            self.condition(
                kv_heads > 0 and query_heads % kv_heads == 0,
                f"{query_heads} query heads are not a multiple of {kv_heads} KV heads",
            )

    def condition(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def finish(self) -> None:
        """Raise ArgumentError if anything was wrong."""
        if self.problems:
            raise ArgumentError(f"longspark.{self.op}: " + "; ".join(self.problems))
