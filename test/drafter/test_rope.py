"""Rope tables against transformers' own modules, far beyond the native context (user case 14)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from longspark_sglang.config import ConfigError
from longspark_sglang.drafter import Rope, TargetParts, rope_tables
from longspark_sglang.drafter.rope import rotate
from tiny_targets import make_target
from transformers import LlamaConfig, Qwen3Config
from transformers.models.hunyuan_v1_dense.configuration_hunyuan_v1_dense import HunYuanDenseV1Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

POSITIONS = torch.tensor([0, 1, 8191, 32767, 40960, 131071])
SIZES = dict(
    hidden_size=256, num_attention_heads=2, num_key_value_heads=2, head_dim=128, vocab_size=32,
    num_hidden_layers=2, intermediate_size=64, max_position_embeddings=40960,
)  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "native": (Qwen3Config, Qwen3RotaryEmbedding, {"rope_type": "default"}),
    "linear": (LlamaConfig, LlamaRotaryEmbedding, {"rope_type": "linear", "factor": 3.0}),
    # transformers and SGLang both spell the fixed NTK base so; Hunyuan is transformers' user of it.
    "fixed-ntk": (
        HunYuanDenseV1Config,
        HunYuanDenseV1RotaryEmbedding,
        {"rope_type": "dynamic", "alpha": 4.0, "factor": 1.0},
    ),
    "yarn": (Qwen3Config, Qwen3RotaryEmbedding, YARN),
    "yarn-tuned": (
        Qwen3Config,
        Qwen3RotaryEmbedding,
        {**YARN, "factor": 16.0, "beta_fast": 24, "beta_slow": 2, "attention_factor": 1.1},
    ),
    "yarn-untruncated": (Qwen3Config, Qwen3RotaryEmbedding, {**YARN, "truncate": False}),
    "yarn-mscale": (
        Qwen3Config,
        Qwen3RotaryEmbedding,
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "llama3": (LlamaConfig, LlamaRotaryEmbedding, LLAMA3),
}


@pytest.mark.parametrize("theta", (1e6, 5e5))
@pytest.mark.parametrize("name", CASES)
def test_tables_equal_those_of_transformers(name: str, theta: float) -> None:
    config_class, rotary_class, rope = CASES[name]
    config = config_class(**SIZES, rope_parameters={**rope, "rope_theta": theta})
    config.max_position_embeddings = 140288  # else Hunyuan's turns dynamic at long positions
    wanted_cos, wanted_sin = rotary_class(config)(torch.zeros(1), POSITIONS[None])
    cos, sin = rope_tables(config, POSITIONS)
    assert cos.shape == (len(POSITIONS), 64)
    # Both halves of transformers' tables are the same.
    assert torch.equal(cos, wanted_cos[0, :, :64])
    assert torch.equal(sin, wanted_sin[0, :, 64:])


def test_old_notation_of_a_dict_reads_the_same() -> None:
    new = {**SIZES, "rope_parameters": {**YARN, "rope_theta": 1e6}}
    old = {**SIZES, "rope_theta": 1e6, "rope_scaling": {**YARN, "type": "yarn"}}
    del old["rope_scaling"]["rope_type"]
    for found, wanted in zip(rope_tables(old, 50), rope_tables(new, 50), strict=True):
        assert torch.equal(found, wanted)


def test_the_full_attention_rope_of_a_hybrid_target_is_taken() -> None:
    nested = {
        "full_attention": {**YARN, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    hybrid = rope_tables({**SIZES, "rope_parameters": nested}, 50)
    plain = rope_tables({**SIZES, "rope_parameters": nested["full_attention"]}, 50)
    assert torch.equal(hybrid[0], plain[0]) and torch.equal(hybrid[1], plain[1])


def test_fixed_ntk_base_of_the_release() -> None:
    """alpha 4 on base 1e6 and head dim 128 is a base of 4,088,994.243 (spec, section 6)."""
    rope = Rope.of_target(
        {**SIZES, "rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "alpha": 4}}
    )
    second = rope.inverse_frequencies[1].item()
    assert math.isclose(second ** (-128 / 2), 4_088_994.243, rel_tol=1e-5)
    assert rope.attention_scaling == 1.0


def test_rotation_is_by_the_position_and_keeps_lengths() -> None:
    cos, sin = rope_tables({**SIZES, "rope_theta": 1e4}, 40)
    x = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(0)).expand(40, 2, 128)
    turned = rotate(x, cos, sin)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.equal(turned[0], x[0])
    dots = (turned[5:] * turned[:-5]).sum(-1)  # depends on the distance only
    assert torch.allclose(dots, dots[:1].expand_as(dots), rtol=1e-4, atol=1e-3)


def test_a_model_that_does_not_follow_its_config_is_noticed() -> None:
    follows = make_target(heads=2, kv_heads=2, rope_parameters={**YARN, "rope_theta": 1e4})
    assert TargetParts.from_hf(follows).rope.attention_scaling > 1
    # transformers' Qwen3 knows no alpha and would make native tables, SGLang's makes NTK's.
    alpha = {"rope_type": "dynamic", "alpha": 4.0, "factor": 1.0, "rope_theta": 1e4}
    ignores = make_target(heads=2, kv_heads=2, rope_parameters=alpha)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM does not rotate as its config says"):
        TargetParts.from_hf(ignores)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}, "give a fixed alpha"),
        ({"rope_type": "longrope", "rope_theta": 1e6}, "'longrope' is not supported"),
        ({"rope_type": "yarn", "rope_theta": 1e6}, "needs the number.s. factor"),
        ({"rope_type": "default"}, "names no rope_theta"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "rotates 0.5 of each head"),
        ({"rope_theta": 1e6, "mrope_section": [8, 8, 8]}, "multi-axis"),
        ({"sliding_attention": {"rope_theta": 1e6}}, "none for 'full_attention'"),
    ],
)
def test_what_cannot_be_followed_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_tables({**SIZES, "rope_parameters": rope}, 4)
