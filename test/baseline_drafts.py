"""Seeded tiny drafts in the formats of SGLang's DFLASH, DSPARK and EAGLE3, with real acceptance.

Made for a target of `pairs.make_target`, whose next token is most of the time "the token after" on
one cycle: `turn` applied to a code vector that can be read off an embedding row. Each draft here is
a small network that computes just that, in the one way its architecture offers:

* DSPARK corrects its base logits by a bigram matrix, W2 W1[previous token], which can hold `turn`.
* DFLASH fills a block [anchor, mask, mask ...] at once. Query head i is turned so that it looks
  exactly i positions back, hence head i of slot i sees the anchor, and its output matrix applies
  turn^i.
* EAGLE3 drafts token by token: its heads look at their own position, and the output matrix applies
  `turn`.

Everything else in them is small noise, so that each draft still depends on its context.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pairs import MASK, RECIPE_FILE, _Code
from safetensors.torch import save_file

BLOCK = 8  # verify width of all three: the last committed token and seven drafts
NOISE = 0.02


class _Target:
    """What a draft must know of its target."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = Path(directory)
        self.config = json.loads((folder / "config.json").read_text())
        recipe = json.loads((folder / RECIPE_FILE).read_text())
        self.hidden = self.config["hidden_size"]
        self.rows = self.config["vocab_size"]
        self.code_size, self.vocab = recipe["code_size"], recipe["vocab"]
        self.in_code = slice(1, 1 + self.code_size)
        self.code = _Code(recipe["vocab"], recipe["code_size"], recipe["seed"])
        self.scale = recipe["logit_reached"]
        layers = self.config["num_hidden_layers"]
        self.taps = sorted({1, layers // 2, layers - 2})


def make_dspark(
    directory: str | os.PathLike[str],
    target_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Qwen3DSparkModel folder for the target and return its path."""
    target = _Target(target_dir)
    noise = _noise(seed)
    weights = _dflash_layers(target, noise, heads=8, layers=2)
    weights["norm.weight"].mul_(0.2)  # base logits well below the bigram's
    size = target.code_size
    first, second = torch.zeros(target.rows, size), torch.zeros(target.rows, size)
    first[: target.vocab] = target.code.vectors @ target.code.turn.T
    second[: target.vocab] = target.code.vectors * target.scale
    weights |= {
        "markov_head.markov_w1.weight": first,
        "markov_head.markov_w2.weight": second,
        "confidence_head.proj.weight": noise(1, target.hidden + size),
        "confidence_head.proj.bias": noise(1),
    }
    config = _qwen_config(target, heads=8, layers=2, dtype=dtype)
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": BLOCK - 1,
        "num_target_layers": target.config["num_hidden_layers"],
        "target_layer_ids": target.taps,
        "mask_token_id": MASK,
        "markov_rank": size,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return _save(directory, config, weights, dtype)


def make_dflash(
    directory: str | os.PathLike[str],
    target_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a DFlashDraftModel folder for the target and return its path."""
    target = _Target(target_dir)
    heads = BLOCK
    weights = _dflash_layers(target, _noise(seed), heads=heads, layers=2)
    head_dim = _head_dim(target)
    mixer = "layers.0.self_attn."
    weights[mixer + "q_proj.weight"][:, 0] = 4.0 * torch.cat(
        [_looks_back(i, head_dim, _theta(target)) for i in range(heads)]
    )
    weights[mixer + "k_proj.weight"][:, 0] = 4.0
    weights[mixer + "q_norm.weight"].fill_(6.0)
    weights[mixer + "k_norm.weight"].fill_(6.0)
    weights[mixer + "v_proj.weight"][: target.code_size, target.in_code] = torch.eye(
        target.code_size
    )
    view = _head_view(target_dir, target)
    for i in range(1, heads):
        columns = slice(i * head_dim, i * head_dim + target.code_size)
        step = torch.linalg.matrix_power(target.code.turn, i)
        weights[mixer + "o_proj.weight"][target.in_code, columns] = view @ step
    # A context row has the constant, so that a head may look past the anchor, but no code there.
    weights["fc.weight"][: 1 + target.code_size] = 0
    weights["fc.weight"][0, 0] = 1.0
    config = _qwen_config(target, heads=heads, layers=2, dtype=dtype)
    config |= {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "num_target_layers": target.config["num_hidden_layers"],
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": target.taps},
    }
    return _save(directory, config, weights, dtype)


def make_eagle3(
    directory: str | os.PathLike[str],
    target_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a LlamaForCausalLMEagle3 folder for the target and return its path."""
    target = _Target(target_dir)
    noise = _noise(seed)
    h, d, heads, kv_heads = target.hidden, _head_dim(target), 4, 2
    code, size = target.in_code, target.code_size
    # The first h inputs are the token's embedding, the other h the hidden state.
    query, key, value = (noise(n * d, 2 * h) for n in (heads, kv_heads, kv_heads))
    query[:, 0] = _looks_back(0, d, _theta(target)).repeat(heads) * 3.0
    key[:, 0] = 3.0
    value[:size, code] = torch.eye(size)
    output = noise(h, heads * d)
    output[code, :size] = target.code.turn
    head = noise(target.rows, h)
    head[: target.vocab, code] = target.code.vectors * 20.0
    weights = {
        "midlayer.self_attn.q_proj.weight": query,
        "midlayer.self_attn.k_proj.weight": key,
        "midlayer.self_attn.v_proj.weight": value,
        "midlayer.self_attn.o_proj.weight": output,
        "midlayer.input_layernorm.weight": torch.ones(h),
        "midlayer.hidden_norm.weight": torch.ones(h),
        "midlayer.post_attention_layernorm.weight": torch.ones(h),
        "midlayer.mlp.gate_proj.weight": noise(2 * h, h),
        "midlayer.mlp.up_proj.weight": noise(2 * h, h),
        "midlayer.mlp.down_proj.weight": noise(h, 2 * h),
        # With norm_output the next step starts from this small vector, not from the last token.
        "norm.weight": torch.full((h,), 0.05),
        "fc.weight": noise(h, len(target.taps) * h),
        "lm_head.weight": head,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": h,
        "intermediate_size": 2 * h,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d,
        "num_hidden_layers": 1,
        "vocab_size": target.rows,
        "draft_vocab_size": target.rows,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": target.taps},
        **_common(target, dtype),
    }
    return _save(directory, config, weights, dtype)


MAKERS: dict[str, Callable[..., Path]] = {
    "DFLASH": make_dflash,
    "DSPARK": make_dspark,
    "EAGLE3": make_eagle3,
}
# Command-line options that the format does not carry itself.
SERVER_ARGS: dict[str, Sequence[str]] = {
    "DFLASH": (),
    "DSPARK": (),
    "EAGLE3": (
        *("--speculative-num-steps", str(BLOCK - 1)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(BLOCK)),
    ),
}


def _noise(seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator) * NOISE


def _head_dim(target: _Target) -> int:
    if target.code_size > 64:
        raise ValueError(f"the code must fit one head of 64, not {target.code_size}")
    return 64


def _theta(target: _Target) -> float:
    return float(target.config["rope_parameters"]["rope_theta"])


def _looks_back(distance: int, head_dim: int, theta: float) -> torch.Tensor:
    """Query [head_dim] whose rotary score with an all-ones key peaks `distance` positions back."""
    half = torch.arange(head_dim // 2, dtype=torch.float64)
    angle = distance * theta ** (-half / (head_dim // 2))
    return torch.cat([angle.cos() + angle.sin(), angle.cos() - angle.sin()]).float()


def _head_view(target_dir: str | os.PathLike[str], target: _Target) -> torch.Tensor:
    """Rotation [code, code] through which the target's head sees a code vector."""
    from safetensors.torch import load_file

    head = load_file(Path(target_dir) / "model.safetensors").get("lm_head.weight")
    if head is None:
        return torch.eye(target.code_size)
    seen = head[: target.vocab, target.in_code]
    return torch.linalg.lstsq(target.code.vectors, seen).solution.T


def _dflash_layers(
    target: _Target, noise: Callable[..., torch.Tensor], *, heads: int, layers: int
) -> dict[str, torch.Tensor]:
    """Weights that DFLASH and DSPARK drafts share, all noise: one KV head, `heads` query heads."""
    h, d = target.hidden, _head_dim(target)
    weights = {
        "fc.weight": noise(h, len(target.taps) * h),
        "hidden_norm.weight": torch.ones(h),
        "norm.weight": torch.ones(h),
    }
    for i in range(layers):
        name = f"layers.{i}."
        weights |= {
            f"{name}self_attn.q_proj.weight": noise(heads * d, h),
            f"{name}self_attn.k_proj.weight": noise(d, h),
            f"{name}self_attn.v_proj.weight": noise(d, h),
            f"{name}self_attn.o_proj.weight": noise(h, heads * d),
            f"{name}self_attn.q_norm.weight": torch.ones(d),
            f"{name}self_attn.k_norm.weight": torch.ones(d),
            f"{name}input_layernorm.weight": torch.ones(h),
            f"{name}post_attention_layernorm.weight": torch.ones(h),
            f"{name}mlp.gate_proj.weight": noise(2 * h, h),
            f"{name}mlp.up_proj.weight": noise(2 * h, h),
            f"{name}mlp.down_proj.weight": noise(h, 2 * h),
        }
    return weights


def _common(target: _Target, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "rms_norm_eps": target.config["rms_norm_eps"],
        "hidden_act": "silu",
        "max_position_embeddings": target.config["max_position_embeddings"],
        "rope_theta": _theta(target),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": target.config["bos_token_id"],
        "eos_token_id": target.config["eos_token_id"],
    }


def _qwen_config(target: _Target, *, heads: int, layers: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": target.hidden,
        "intermediate_size": 2 * target.hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": _head_dim(target),
        "num_hidden_layers": layers,
        "vocab_size": target.rows,
        **_common(target, dtype),
    }


def _save(
    directory: str | os.PathLike[str],
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> Path:
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder
