"""The config: release keys and defaults, every refusal with its name and fix, target matching."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longspark_sglang.config import (
    TRAINING_OBJECTIVES,
    ConfigError,
    LongSparkConfig,
    layer_ids_of_policy,
)
from transformers import Qwen3Config

# As a release file would spell it, with keys of other modes and of Hugging Face around.
QWEN3_8B: dict[str, Any] = {
    "model_type": "draftfreekv",
    "architectures": ["DraftFreeKVModel"],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "draft_mode": "parallel_shifted_qwen",
    "global16_raw256_enabled": True,
    "block_size": 7,
    "target_layer_ids": [0, 9, 18, 26, 35],
    "target_layer_policy": "uniform_5",
    "num_target_layers": 36,
    "hidden_size": 4096,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "qwen_num_attention_heads": 32,
    "qwen_intermediate_size": 12288,
    "qwen_rope_theta": 1000000.0,
    "qwen_rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "mask_token_id": 151669,
    "parallel_mixer_layers": 5,
    "parallel_markov_rank": 256,
    "parallel_markov_head_type": "vanilla",
    "global_memory_slots": 16,
    "raw_target_rows": 256,
    "local_draft_rows": 7,
    "max_accepted_tokens": 8,
    "global_memory_source_window": "full",
    "global_checkpoint_compatibility": "retrain_required",
    "global_query_mode": "learned",
    "global_query_equicorrelation": 0.4,
    "global_query_slot_mass_mode": "system",
    "target_kv_memory_layout": "direct",
    "target_kv_window_size": None,
    "memory_output_slots": None,
    "memory_source_window": None,
    "training_objective": "kl",
    "target_model_name_or_path": "Qwen/Qwen3-8B",
    "adapter_rank": 512,
    "memory_query_mode": "learned",
    "xpress_depth": 2,
    "qwen_initialize_from_target": False,
}
TARGET_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
}


def reasons_of(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        LongSparkConfig.from_dict({**QWEN3_8B, **changes})
    for reason in caught.value.reasons:
        assert reason in str(caught.value)
    return caught.value.reasons


def test_release_file_reads_and_derives() -> None:
    config = LongSparkConfig.from_dict(QWEN3_8B)
    assert (config.num_layers, config.num_draft_tokens, config.verify_width) == (5, 7, 8)
    assert (config.summary_slots, config.window, config.markov_rank) == (16, 256, 256)
    assert (config.num_attention_heads, config.head_group) == (32, 4)
    assert config.tapped_layers == (0, 9, 18, 26, 35)
    assert config.dtype == "bfloat16"
    assert config.extra == {"transformers_version": "4.57.1", "xpress_depth": 2}


@pytest.mark.parametrize(
    ("hidden", "heads", "summary", "boundary"),
    [(2560, 32, 1_320_960, 25_600), (4096, 32, 1_320_960, 40_960), (5120, 40, 1_651_200, 51_200)],
)
def test_state_bytes_of_the_releases(hidden: int, heads: int, summary: int, boundary: int) -> None:
    config = LongSparkConfig.from_dict(
        {**QWEN3_8B, "hidden_size": hidden, "qwen_num_attention_heads": heads}
    )
    assert config.summary_bytes_per_request == summary
    assert config.state_bytes_per_request() == summary + boundary
    assert config.state_bytes_per_request(tp_size=4) == summary // 4 + boundary
    assert config.state_bytes_per_request(boundary_itemsize=4) == summary + 2 * boundary
    with pytest.raises(ValueError, match="tp_size 7 does not divide"):
        config.state_bytes_per_request(tp_size=7)


def test_class_defaults_are_those_of_the_original() -> None:
    """Only keys without which no drafter can exist are given; all others take their default."""
    config = LongSparkConfig.from_dict(
        {
            "draft_mode": "parallel_shifted_qwen",
            "global16_raw256_enabled": True,
            "block_size": 7,
            "target_layer_ids": [0, 9, 18, 26, 35],
            "num_key_value_heads": 32,
            "qwen_num_attention_heads": 32,
            "qwen_intermediate_size": 4096,
            "mask_token_id": 7,
            "parallel_markov_rank": 256,
        }
    )
    for name, value in {
        "model_type": "draftfreekv", "hidden_size": 4096, "head_dim": 128, "vocab_size": 32000,
        "qwen_rope_theta": 1e6, "qwen_rms_norm_eps": 1e-6, "parallel_mixer_layers": 5,
        "parallel_markov_head_type": "vanilla", "global_memory_slots": 16, "raw_target_rows": 256,
        "local_draft_rows": 7, "max_accepted_tokens": 8, "global_memory_source_window": "full",
        "global_checkpoint_compatibility": "retrain_required", "global_query_mode": "learned",
        "global_query_equicorrelation": 0.4, "global_query_slot_mass_mode": "system",
        "target_kv_memory_layout": "direct", "training_objective": "ce", "adapter_rank": 512,
        "adapter_alpha": 512, "parallel_mixer_num_heads": 8, "target_kv_memory_query_rank": 16,
    }.items():  # fmt: skip
        assert getattr(config, name) == value, name
    for name in ("dtype", "num_target_layers", "target_layer_policy", "memory_output_slots"):
        assert getattr(config, name) is None, name
    # The defaults that this drafter refuses, one by one.
    with pytest.raises(ConfigError) as caught:
        LongSparkConfig.from_dict({})
    named = " ".join(reason.split()[0] for reason in caught.value.reasons)
    assert named == (
        "target_layer_ids draft_mode global16_raw256_enabled qwen_intermediate_size "
        "parallel_markov_rank mask_token_id local_draft_rows max_accepted_tokens "
        "qwen_num_attention_heads"
    )


def test_round_trip(tmp_path: Path) -> None:
    config = LongSparkConfig.from_dict(QWEN3_8B)
    config.save_pretrained(tmp_path / "new" / "folder")
    assert LongSparkConfig.from_pretrained(tmp_path / "new" / "folder") == config
    written = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    for key, value in QWEN3_8B.items():
        # Null and default values of inactive keys are left out, torch_dtype has its new name.
        if key not in ("torch_dtype", "adapter_rank") and value is not None:
            assert written[key] == value
    assert written["dtype"] == "bfloat16"


STRUCTURAL = {
    "model_type": "qwen3",
    "draft_mode": "markov",
    "global16_raw256_enabled": False,
    "parallel_markov_head_type": "gated",
    "global_memory_source_window": "recent",
    "global_checkpoint_compatibility": "any",
    "target_kv_memory_layout": "paged",
    "target_kv_window_size": 64,
    "memory_output_slots": 4,
    "memory_source_window": "full",
    "dtype": "float16",
    "global_query_mode": "random",
    "training_objective": "mse",
}
SIZES = {
    "block_size": [0, 17, -1],
    "hidden_size": [0, 2**31],
    "num_key_value_heads": [0, 3, 64, 1],  # 64 > heads; 1 makes groups of 32
    "head_dim": [0, 96, 33, 512, -16],
    "qwen_num_attention_heads": [None, 0, 33],
    "qwen_intermediate_size": [None, 0],
    "qwen_rope_theta": [0, -1e6],
    "qwen_rms_norm_eps": [0.0],
    "vocab_size": [0, 2**31],
    "mask_token_id": [None, -1, 151936],
    "parallel_mixer_layers": [0, 4],
    "parallel_markov_rank": [0, -1],
    "global_memory_slots": [0, 33],
    "raw_target_rows": [0, 1025],
    "local_draft_rows": [8],
    "max_accepted_tokens": [7],
    "num_target_layers": [0, -36, 35],
    "target_layer_ids": [[0, 9, 18, 26], [0, 9, 18, 26, 26], [0, 9, 18, 26, 36], [-1, 1, 2, 3, 4]],
}
TYPES = {
    "block_size": [7.0, "7", True, [7]],
    "hidden_size": [None, 4096.5],
    "qwen_rope_theta": ["1e6", None, float("nan"), float("inf"), True],
    "draft_mode": [None, 3],
    "global16_raw256_enabled": [1, "true", None],
    "target_layer_ids": [[0.0, 1, 2, 3, 4], "0,1", {"0": 1}, [[0]], 5],
    "architectures": ["DraftFreeKVModel", [1]],
    "dtype": [16, ["bfloat16"]],
    "global_query_equicorrelation": [None, "0.4"],
}
BAD = (
    list(STRUCTURAL.items())
    + [(key, value) for key, values in SIZES.items() for value in values]
    + [(key, value) for key, values in TYPES.items() for value in values]
)


@pytest.mark.parametrize(("key", "value"), BAD)
def test_every_bad_value_is_named(key: str, value: Any) -> None:
    without_old_dtype = {"torch_dtype": "bfloat16"} if key != "dtype" else {"torch_dtype": value}
    reasons = reasons_of(**{key: value, **without_old_dtype})
    assert any(key in reason for reason in reasons)
    for reason in reasons:
        assert ": " in reason or " must be " in reason or "multiple" in reason  # says what to do


def test_all_reasons_come_at_once() -> None:
    reasons = reasons_of(
        draft_mode="markov", global_memory_slots=64, mask_token_id=None, target_layer_ids=[0, 0]
    )
    for name in (
        "draft_mode",
        "global_memory_slots",
        "mask_token_id",
        "repeats a layer",
        "lists 2",
    ):
        assert any(name in reason for reason in reasons), name
    reasons = reasons_of(windows=3, head_dimm=128, hidden_size="4096")
    assert reasons == [
        "unknown key 'windows': remove it",
        "unknown key 'head_dimm': did you mean 'head_dim'?",
        "hidden_size must be an integer, not '4096'",
    ]


def test_disagreeing_dtypes() -> None:
    assert "disagree" in reasons_of(dtype="float32")[0]
    assert LongSparkConfig.from_dict({**QWEN3_8B, "dtype": "bfloat16"}).dtype == "bfloat16"
    prefixed = {**QWEN3_8B, "torch_dtype": "torch.bfloat16"}
    assert LongSparkConfig.from_dict(prefixed).dtype == "bfloat16"


@pytest.mark.parametrize("objective", TRAINING_OBJECTIVES)
def test_known_objectives(objective: str) -> None:
    config = LongSparkConfig.from_dict({**QWEN3_8B, "training_objective": objective})
    assert config.training_objective == objective


@pytest.mark.parametrize(
    ("rho", "good"), [(0.4, True), (-0.06, True), (1.0, False), (-0.07, False)]
)
def test_equicorrelation_counts_in_fixed_mode_only(rho: float, good: bool) -> None:
    changes = {"global_query_equicorrelation": rho, "global_query_mode": "fixed_equicorrelated"}
    if good:
        assert (
            LongSparkConfig.from_dict({**QWEN3_8B, **changes}).global_query_equicorrelation == rho
        )
    else:
        assert "must lie between" in reasons_of(**changes)[0]
        LongSparkConfig.from_dict({**QWEN3_8B, **changes, "global_query_mode": "learned"})
    small = {"head_dim": 8, "global_query_mode": "fixed_equicorrelated"}
    assert "exceeds head_dim 8" in reasons_of(**small)[0]


# -- layer policies


def test_policies_of_the_release() -> None:
    assert layer_ids_of_policy("uniform_5", 36, 5) == (0, 9, 18, 26, 35)
    assert layer_ids_of_policy("uniform_5", 40, 5) == (0, 10, 20, 29, 39)
    assert layer_ids_of_policy("uniform_n", 36, 5) == (0, 9, 18, 26, 35)
    assert layer_ids_of_policy("last_3", 36, 3) == (33, 34, 35)
    # 4.5 goes to 4 and 13.5 to 14: halves to the even neighbour.
    assert layer_ids_of_policy("uniform_5", 19, 5) == (0, 4, 9, 14, 18)


@pytest.mark.parametrize("policy", ["uniform", "uniform_0", "uniform_1", "uniform_37", "first_3",
                                    "last_99", "last_-1", "uniform_5 ", ""])  # fmt: skip
def test_bad_policies(policy: str) -> None:
    assert any(
        "target_layer_policy" in reason
        for reason in reasons_of(target_layer_ids=None, target_layer_policy=policy)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 200), st.data())
def test_uniform_is_strictly_rising_from_first_to_last(total: int, data: Any) -> None:
    count = data.draw(st.integers(2, total))
    ids = layer_ids_of_policy(f"uniform_{count}", total, count)
    assert ids[0] == 0 and ids[-1] == total - 1 and len(set(ids)) == count


def test_policy_counts_only_where_ids_are_null() -> None:
    explicit = {**QWEN3_8B, "target_layer_ids": [1, 2, 3, 4, 5]}
    assert LongSparkConfig.from_dict(explicit).tapped_layers == (1, 2, 3, 4, 5)
    by_policy = {**QWEN3_8B, "target_layer_ids": None}
    assert LongSparkConfig.from_dict(by_policy).tapped_layers == (0, 9, 18, 26, 35)
    for missing in ("target_layer_policy", "num_target_layers"):
        reasons = reasons_of(**{"target_layer_ids": None, missing: None})
        assert "target_layer_ids is missing" in reasons[0]
    assert any("lists 4 layers" in r for r in
               reasons_of(target_layer_ids=None, target_layer_policy="last_4"))  # fmt: skip


# -- files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "it holds a list"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"hidden_size": NaN}', "hidden_size must be an integer"),
        (b" " * (16 * 2**20 + 1), "far smaller"),
    ],
)
def test_hostile_config_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        LongSparkConfig.from_pretrained(tmp_path)
    assert "config.json" in str(caught.value)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        LongSparkConfig.from_pretrained(tmp_path)


# -- targets


def test_matching_target() -> None:
    config = LongSparkConfig.from_dict(QWEN3_8B)
    assert config.validate_target(TARGET_8B) == []
    assert config.validate_target({"text_config": TARGET_8B, "vocab_size": 1}) == []
    new_notation = {key: value for key, value in TARGET_8B.items() if key != "rope_theta"}
    new_notation["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    assert config.validate_target(new_notation) == []
    assert config.validate_target(Qwen3Config(**new_notation)) == []
    assert config.validate_target(Qwen3Config(**TARGET_8B)) == []


TARGET_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 2560}, "hidden_size 4096 differs from the target's hidden_size 2560"),
    ({"num_attention_heads": 40}, "qwen_num_attention_heads 32 differs"),
    ({"num_key_value_heads": 4}, "num_key_value_heads 8 differs"),
    ({"head_dim": 64}, "head_dim 128 differs"),
    ({"vocab_size": 152064}, "vocab_size 151936 differs from the target's vocab_size 152064"),
    ({"num_hidden_layers": 28}, r"target_layer_ids \[35\] are out of range, .* layers 0..27"),
    ({"num_hidden_layers": 40}, "num_target_layers 36 differs"),
    ({"rope_theta": 10000.0}, "qwen_rope_theta 1000000.0 differs from .* rope_theta 10000.0"),
    ({"rope_theta": None}, "names no rope_theta: add it"),
    ({"rope_theta": "1e6"}, "names no rope_theta"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "give a fixed alpha, or use 'yarn'"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported: use one of"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor, high_freq_factor"),
    ({"partial_rotary_factor": 0.5}, "rotates 0.5 of each head"),
    ({"kv_lora_rank": 512}, "latent attention"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"layer_types": ["sliding_attention"] * 36}, "tapped target layer 9 has 'sliding_attention'"),
    ({"hidden_size": None}, r"no usable hidden_size \(None\)"),
    ({"num_hidden_layers": "36"}, "no usable num_hidden_layers"),
]


@pytest.mark.parametrize(("changes", "message"), TARGET_FAULTS)
def test_every_target_mismatch_is_named(changes: dict[str, Any], message: str) -> None:
    reasons = LongSparkConfig.from_dict(QWEN3_8B).validate_target({**TARGET_8B, **changes})
    with pytest.raises(ConfigError, match=message):
        raise ConfigError("target", reasons)


def test_stretched_targets_keep_their_base() -> None:
    config = LongSparkConfig.from_dict(QWEN3_8B)
    for rope in (
        {"rope_type": "dynamic", "alpha": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"type": "linear", "factor": 2},
    ):
        assert config.validate_target({**TARGET_8B, "rope_scaling": rope}) == []


def test_target_mismatches_come_at_once() -> None:
    other = {**TARGET_8B, "hidden_size": 2560, "vocab_size": 1000, "rope_theta": 5e5}
    assert len(LongSparkConfig.from_dict(QWEN3_8B).validate_target(other)) == 3


def test_for_target_fits_its_target() -> None:
    config = LongSparkConfig.for_target(TARGET_8B, mask_token_id=151669)
    assert config.validate_target(TARGET_8B) == []
    released = LongSparkConfig.from_dict(QWEN3_8B)
    for name in ("tapped_layers", "num_layers", "num_draft_tokens", "window", "summary_slots",
                 "markov_rank", "intermediate_size", "qwen_rope_theta"):  # fmt: skip
        assert getattr(config, name) == getattr(released, name)
    small = LongSparkConfig.for_target(
        Qwen3Config(**TARGET_8B), mask_token_id=3, num_layers=3, markov_rank=32, window=64,
        summary_slots=4, num_draft_tokens=5, intermediate_size=100, training_objective="kd",
    )  # fmt: skip
    assert small.tapped_layers == (0, 18, 35)  # 17.5 goes to 18
    assert (small.verify_width, small.training_objective) == (6, "kd")
    with pytest.raises(ConfigError, match="'uniform_40' asks for 40 of 36"):
        LongSparkConfig.for_target(TARGET_8B, mask_token_id=3, num_layers=40)
    with pytest.raises(ConfigError, match="no usable vocab_size"):
        LongSparkConfig.for_target({**TARGET_8B, "vocab_size": None}, mask_token_id=3)
