"""Small random Hugging Face targets for the drafter's tests, and the views they give."""

from __future__ import annotations

from typing import Any

import torch
from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter import LongSparkDrafter
from oracle import OracleTarget
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 96
MASK = 95


def make_target(
    *, heads: int, kv_heads: int, tied: bool = False, layers: int = 4, seed: int = 0, **more: Any
) -> Any:
    """A float32 target with head dim 16, hidden 48 and varied hidden states."""
    settings: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=16384,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.2,
    )
    settings.update(more)
    torch.manual_seed(seed)
    # Qwen3 norms its keys, Llama does not; the drafter must not care.
    if heads == 3:
        return LlamaForCausalLM(LlamaConfig(**settings)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**settings)).eval()


def make_drafter(target: Any, *, seed: int = 1, **more: Any) -> LongSparkDrafter:
    """A drafter whose every part matters: norms off 1, activations of size 1."""
    values: dict[str, Any] = dict(
        mask_token_id=MASK,
        num_layers=3,
        markov_rank=8,
        intermediate_size=40,
        summary_slots=16,
        num_draft_tokens=7,
    )
    config = LongSparkConfig.for_target(target.config, **{**values, **more})
    drafter = LongSparkDrafter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif "learned_query" in name:
                parameter.normal_(
                    std=0.5, generator=generator
                )  # twice the release: tells rows apart
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return drafter


def oracle_target(target: Any) -> OracleTarget:
    """Float64 copies of the borrowed tensors, and the target's own rotary frequencies."""
    rotary = target.model.rotary_emb
    return OracleTarget(
        embedding=target.get_input_embeddings().weight.detach().double(),
        norm_weight=target.model.norm.weight.detach().double(),
        norm_eps=target.config.rms_norm_eps,
        head=target.get_output_embeddings().weight.detach().double(),
        inverse_frequencies=rotary.inv_freq,
        rope_scaling=rotary.attention_scaling,
    )


@torch.no_grad()
def prefill_in_chunks(target: Any, ids: torch.Tensor, chunk: int = 2048) -> DynamicCache:
    """The cache of a long sequence [T]; the last chunk's hidden states are not needed here."""
    cache = DynamicCache()
    for piece in ids.split(chunk):
        target.model(input_ids=piece[None], past_key_values=cache, use_cache=True)
    return cache
