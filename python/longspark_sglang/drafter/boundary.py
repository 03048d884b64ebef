"""What the drafter sees of the target: boundary vectors and K/V rows of the tapped layers.

The boundary of a position is one vector per tapped layer: the residual stream *after* that layer,
without any norm; for the target's last layer it is the state after the final norm, the one that
enters the head (LongSpark spec, section 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longspark_sglang.config import ConfigError, LongSparkConfig
from longspark_sglang.drafter.parts import RMSNorm, TwoLayerMLP


class BoundaryEncoder(nn.Module):
    """The boundary vectors of the last committed position, condensed into one vector c."""

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.proj = TwoLayerMLP(config.num_layers * h, h)
        self.norm = RMSNorm(h, config.qwen_rms_norm_eps)

    def forward(self, boundary: torch.Tensor) -> torch.Tensor:
        """boundary [..., L, h], in the order of ``target_layer_ids`` -> c [..., h]."""
        return self.norm(self.proj(boundary.to(self.norm.weight.dtype).flatten(-2)))


@dataclass(frozen=True)
class TargetViews:
    """A target's run over whole sequences, as the drafter may see it.

    Attributes:
        boundary: [B, T, L, h], boundary vectors of every position.
        key, value: [B, L, T, Hkv, d], rows of the tapped layers as cached (keys after the target's
            own key norm and rope).
        hidden: [B, T, h], final states after the final norm: times the head they are the logits.
    """

    boundary: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    hidden: torch.Tensor


@torch.no_grad()
def collect_views(hf_model: Any, input_ids: torch.Tensor, config: LongSparkConfig) -> TargetViews:
    """Run a Hugging Face target and keep what the drafter reads.

    Args:
        hf_model: a causal language model of transformers.
        input_ids: [B, T] int64, without padding.
    Raises:
        ConfigError: the target does not fit ``config``.
    """
    reasons = config.validate_target(hf_model.config)
    if reasons:
        raise ConfigError("this target does not fit the drafter", reasons)
    # Imported here: only a target run needs transformers, the drafter itself does not.
    from transformers import DynamicCache

    # Without the model's config the cache keeps every row, of sliding-window layers too.
    cache: Any = DynamicCache()
    run = hf_model.get_decoder()(
        input_ids=input_ids, past_key_values=cache, use_cache=True, output_hidden_states=True
    )
    # hidden_states[0] is the embedding, entry k + 1 the state after layer k; transformers already
    # puts the post-norm state into the last entry.
    boundary = torch.stack([run.hidden_states[k + 1] for k in config.tapped_layers], dim=2)
    key = torch.stack([cache.layers[k].keys for k in config.tapped_layers], dim=1)
    value = torch.stack([cache.layers[k].values for k in config.tapped_layers], dim=1)
    return TargetViews(
        boundary=boundary,
        key=key.transpose(2, 3),
        value=value.transpose(2, 3),
        hidden=run.last_hidden_state,
    )
