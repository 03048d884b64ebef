"""CUDA stream calls that SGLang makes whatever the device is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def record_stream(original: Callable[..., None], tensor: torch.Tensor, stream: Any) -> None:
    """Stands in for torch.Tensor.record_stream: CPU work is synchronous, nothing to record."""
    if tensor.device.type != "cpu":
        original(tensor, stream)
