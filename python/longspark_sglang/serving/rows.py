"""Sets of rows of a batch, chosen on the host and used on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


def device_tensor(
    values: Sequence[Any], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """`values` as a tensor on `device`, without stopping the host."""
    host = torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@dataclass(frozen=True)
class RowSet:
    """Some rows of a batch; `every` spares the copies when it is all of them, in order.

    Attributes:
        index: [n] int64, ascending.
    """

    index: torch.Tensor
    every: bool

    @classmethod
    def of(cls, rows: Sequence[int], size: int, device: torch.device | str) -> RowSet | None:
        """The set of these rows out of `size`; None if there are none."""
        if not rows:
            return None
        return cls(device_tensor(rows, torch.int64, device), len(rows) == size)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of x: x itself if all are meant, else a copy."""
        return x if self.every else x.index_select(0, self.index)

    def put(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows into x, in place."""
        if not self.every:
            x.index_copy_(0, self.index, rows)
        elif rows is not x:
            x.copy_(rows)
