"""A stand-in for CUDA graph capture, and a guard against what no graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that read device memory on the host, or whose result's shape depends on values.
HOST_READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "repeat_interleave",
    "unique",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}


class HostReads(TorchDispatchMode):
    """Collects the operators that a CUDA graph can't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.count = 0  # of all operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func._schema.name.split("::")[1]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        by_mask = name.startswith("index") and any(
            x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1:])
            if isinstance(x, torch.Tensor)
        )  # fmt: skip
        if name in HOST_READS or by_mask:
            self.found.append(f"{name}({', '.join(str(tuple(t.shape)) for t in tensors)})")
        return func(*args, **(kwargs or {}))


class RecordedOps:
    """Runs a function once and remembers its operators with the tensors they had.

    Like a captured graph, a replay runs no Python of the function, reads and writes the same
    memory, and knows nothing of values that were read on the host.
    """

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        tape: list[tuple[Any, Any, dict, Any]] = []

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                tape.append((func, args, kwargs or {}, result))
                return result

        with Recorder():
            function()

        def replay() -> None:
            for func, args, kwargs, before in tape:
                now = func(*args, **kwargs)
                for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                    if isinstance(old, torch.Tensor) and not _same_memory(old, new):
                        old.copy_(new)

        return replay


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A view, or the result of an operator in place."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
