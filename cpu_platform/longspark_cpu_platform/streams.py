"""CUDA stream and device calls that SGLang makes whatever the device is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def record_stream(original: Callable[..., None], tensor: torch.Tensor, stream: Any) -> None:
    """Stands in for torch.Tensor.record_stream: CPU work is synchronous, nothing to record."""
    if tensor.device.type != "cpu":
        original(tensor, stream)


def device_module(original: Callable[..., Any], device: Any = None) -> Any:
    """Stands in for torch.get_device_module: with no argument it means this platform's device."""
    return original("cpu" if device is None else device)
