"""Boundary rows of the tapped target layers, taken out of the target's own forward pass.

A tapped layer's boundary row is the residual stream after that layer; for the last layer it is the
state after the final norm (LongSpark spec, section 1). K/V rows need no tap: they lie in the
target's cache. Only the rows that somebody will read are kept: the last row of each request in a
prefill pass, the rows of the block in a verify pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class TapError(ValueError):
    """The target's modules do not offer what the taps need."""


class BoundaryTaps:
    """Forward hooks that copy chosen rows of the tapped layers into one buffer.

    Args:
        model: SGLang's target model (`model.model.layers`, `model.logits_processor`).
        layer_ids: tapped layers in the order of the drafter's config.
    Raises TapError where the target is no model that can be tapped.

    Attributes:
        rows: [n] int64 indices of the token rows to keep, or None to keep every row of the pass.
        buffer: [L, max_rows, h]; after a forward pass its first n rows hold the kept rows. One
        buffer
            for the life of the server, so that a captured graph keeps writing where we read.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        layers = _decoder_layers(model)
        self.rows: torch.Tensor | None = None
        self.buffer = torch.empty(len(layer_ids), 0, 0)
        for tap, layer_id in enumerate(layer_ids):
            if layer_id + 1 < len(layers):
                # SGLang defers the residual addition into the next layer's norm, so the stream
                # after layer i exists as one tensor only where layer i+1 starts.
                layers[layer_id + 1].register_forward_pre_hook(
                    self._capture_hook(tap), with_kwargs=True
                )
            else:
                # The logits processor receives the normed state whichever fused path made it.
                model.logits_processor.register_forward_pre_hook(
                    self._final_state_hook(tap), with_kwargs=True
                )

    def allocate(
        self, max_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Make the buffer: `max_rows` is the most rows that one pass keeps."""
        self.buffer = torch.zeros(
            self.buffer.shape[0], max_rows, hidden_size, dtype=dtype, device=device
        )

    def kept(self, count: int) -> torch.Tensor:
        """The kept rows of the last pass, [count, L, h] (a copy)."""
        return self.buffer[:, :count].transpose(0, 1).contiguous()

    def _keep(self, tap: int, hidden: torch.Tensor) -> None:
        if self.rows is None:
            # A graph-padded pass may be wider than the buffer; its real rows come first.
            count = min(hidden.shape[0], self.buffer.shape[1])
            self.buffer[tap, :count].copy_(hidden[:count])
        else:
            torch.index_select(hidden, 0, self.rows, out=self.buffer[tap, : self.rows.shape[0]])

    def _capture_hook(self, tap: int):
        def hook(module, args, kwargs):
            outer = kwargs.get("capture_output")

            def capture(hidden: torch.Tensor, *, owned: bool = False) -> None:
                self._keep(tap, hidden)
                if outer is not None:
                    outer(hidden, owned=owned)

            return args, {**kwargs, "capture_output": capture}

        return hook

    def _final_state_hook(self, tap: int):
        def hook(module, args, kwargs):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
            self._keep(tap, hidden)

        return hook


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The target's decoder layers, or a TapError that says what is missing."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    name = type(model).__name__
    if layers is None or not hasattr(model, "logits_processor"):
        raise TapError(
            f"target {name} has no model.layers / logits_processor: LONGSPARK taps Llama-shaped "
            "models (Llama, Mistral, Qwen2, Qwen3)"
        )
    parameters = inspect.signature(type(layers[0]).forward).parameters
    if "capture_output" not in parameters:
        raise TapError(
            f"the layers of target {name} take no capture_output argument, so their residual "
            "stream cannot be read; LONGSPARK serves Llama, Mistral, Qwen2 and Qwen3 targets"
        )
    return layers
