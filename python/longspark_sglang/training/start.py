"""A start from the target's own weights.

A drafter layer reads the K/V rows of one tapped target layer. If it begins as a copy of that layer,
its queries fit those keys from the first step on, and its output is in the target's residual space,
which the borrowed head reads. The release started at random; a short training gains by the copy.
"""

from __future__ import annotations

from typing import Any

import torch

from longspark_sglang.drafter import LongSparkDrafter


@torch.no_grad()
def start_from_target(drafter: LongSparkDrafter, hf_model: Any) -> None:
    """Copy the tapped layers of a transformers model into the drafter's layers, in order.

    Norms, projections and MLP; of a wider MLP the neurons with the largest weights, of a narrower
    one all, beside the drafter's own. What the target layer lacks stays as it is: in Llama the
    norms of queries and keys.
    """
    layers = hf_model.get_decoder().layers
    taps = drafter.config.tapped_layers
    for mine, tap in zip(drafter.parallel_qwen_layers, taps, strict=True):
        theirs = layers[tap]
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(mine, name).weight.copy_(getattr(theirs, name).weight)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            source = getattr(theirs.self_attn, name, None)
            if source is not None:
                getattr(mine.self_attn, name).weight.copy_(source.weight)
        gate, up, down = (getattr(theirs.mlp, f"{n}_proj").weight for n in ("gate", "up", "down"))
        size = min(drafter.config.intermediate_size, len(gate))
        weight = up.float().norm(dim=1) * down.float().norm(dim=0)
        kept = weight.argsort(descending=True)[:size].sort().values
        mine.mlp.gate_proj.weight[:size] = gate[kept].to(mine.mlp.gate_proj.weight)
        mine.mlp.up_proj.weight[:size] = up[kept].to(mine.mlp.up_proj.weight)
        mine.mlp.down_proj.weight[:, :size] = down[:, kept].to(mine.mlp.down_proj.weight)
