"""Property tests: whatever a file or a request holds, the answer is a value or one clear error."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from longspark_sglang import checkpoint
from longspark_sglang.checkpoint import CheckpointError, load_state
from longspark_sglang.config import ConfigError, LongSparkConfig
from safetensors.torch import save_file
from test_checkpoint import make_config, tensors

pytest.importorskip("sglang")

from longspark_sglang.serving import compat
from longspark_sglang.serving.acceptance import is_enabled, request_refusals

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["../../etc/passwd", "/dev/zero", "a\0b", "model.safetensors", "\ud800"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)

# -- checkpoint folders ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LongSparkConfig, bytes]:
    """A good folder, its config and the bytes of its weights."""
    folder, config = tmp_path_factory.mktemp("drafter"), make_config()
    config.save_pretrained(folder)
    save_file(tensors(config), folder / checkpoint.WEIGHTS_NAME, metadata={"format": "pt"})
    return folder, config, (folder / checkpoint.WEIGHTS_NAME).read_bytes()


def load_or_refuse(folder: Path, config: LongSparkConfig) -> None:
    """What was loaded is a drafter's state; what was not has one error with its reasons."""
    try:
        state = load_state(folder, config)
    except CheckpointError as error:
        assert len(str(error)) > 20
    else:
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        assert shapes == checkpoint.expected_tensors(config)
        assert all(torch.isfinite(tensor).all() for tensor in state.values())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_weights(drafter: tuple[Path, LongSparkConfig, bytes], data: Any) -> None:
    """Cut off, overwritten somewhere, or with another header length."""
    good, config, content = drafter
    header = 8 + int.from_bytes(content[:8], "little")
    damaged = bytearray(content)
    kind = data.draw(st.sampled_from(["cut", "header", "length", "tail"]))
    if kind == "cut":
        del damaged[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "header":
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(8, header - 1))] = data.draw(st.integers(0, 255))
    elif kind == "length":
        damaged[:8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    else:
        damaged += data.draw(st.binary(min_size=1, max_size=9))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(good / "config.json", folder)
        (folder / checkpoint.WEIGHTS_NAME).write_bytes(damaged)
        load_or_refuse(folder, config)


@settings(max_examples=60, deadline=None)
@given(weight_map=JSON | st.dictionaries(st.text(max_size=8), SCALARS, max_size=4))
def test_any_index(drafter: tuple[Path, LongSparkConfig, bytes], weight_map: Any) -> None:
    """Nothing outside the folder is opened, whatever the index names."""
    good, config, content = drafter
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(good / "config.json", folder)
        (folder / "part.safetensors").write_bytes(content)
        (folder / checkpoint.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError):
            load_state(folder, config)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_config(drafter: tuple[Path, LongSparkConfig, bytes], data: Any) -> None:
    """Each value of a good config replaced by anything."""
    values = json.loads((drafter[0] / "config.json").read_text())
    for key in data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=3)):
        values[key] = data.draw(JSON)
    try:
        config = LongSparkConfig.from_dict(values)
    except ConfigError as error:
        assert len(str(error)) > 20
    else:
        assert config.verify_width >= 2 and config.window > 0
        assert checkpoint.predicted_file_size(config) > 0


# -- requests -------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(params=JSON | st.fixed_dictionaries({"longspark": JSON}))
def test_custom_params_of_any_shape(params: Any) -> None:
    req = SimpleNamespace(
        origin_input_ids=[5],
        sampling_params=SimpleNamespace(
            custom_params=params, min_p=0.0, top_k=1, min_new_tokens=0, logit_bias=None
        ),
        custom_logit_processor=None,
        return_hidden_states=False,
        return_sampling_mask=False,
    )
    reasons = request_refusals(req, deterministic=False)
    assert isinstance(is_enabled(req), bool)
    ours = params.get("longspark") if isinstance(params, dict) else None
    good = ours is None or (
        isinstance(ours, dict)
        and ours.keys() <= {"enabled"}
        and all(isinstance(value, bool) for value in ours.values())
    )
    assert bool(reasons) != good
    if good:
        assert is_enabled(req) is (ours or {}).get("enabled", True)


@pytest.mark.parametrize(
    ("values", "reasons"),
    [
        ({"top_k": 2**31 - 1}, 0),
        ({"top_k": 2**31}, 1),
        ({"stop_token_ids": {-1, 50, 2**40}}, 0),
        ({"stop_token_ids": {0, 49}, "min_new_tokens": 2}, 0),
        ({"stop_token_ids": {-1, 50, 2**40}, "min_new_tokens": 2}, 1),
        ({"logit_bias": {"7": -1e30, "8": 1, "9": float("-inf")}}, 0),
        ({"logit_bias": {"7": "x", "8": float("nan"), "9": float("inf")}}, 3),
        ({"top_k": 2**40, "logit_bias": {"7": None}}, 2),
    ],
)
def test_values_that_would_end_the_scheduler(values: dict[str, Any], reasons: int) -> None:
    """SGLang's own checks let these through; the tensors of a batch cannot hold them."""
    params = {"custom_params": None, "min_p": 0.0, "top_k": 1, "min_new_tokens": 0}
    req = SimpleNamespace(
        origin_input_ids=[5],
        sampling_params=SimpleNamespace(
            **{**params, "logit_bias": None, "stop_token_ids": None, **values}
        ),
        custom_logit_processor=None,
        return_hidden_states=False,
        multimodal_inputs=None,
        vocab_size=50,
    )
    assert len(request_refusals(req, deterministic=False)) == reasons


@pytest.mark.parametrize(
    ("ids", "word"), [([], "no token"), ([5, -1], "outside 0..49"), ([50], "outside 0..49")]
)
def test_a_prompt_that_cannot_be_embedded(ids: list[int], word: str) -> None:
    req = SimpleNamespace(
        origin_input_ids=ids,
        multimodal_inputs=None,
        vocab_size=50,
        sampling_params=SimpleNamespace(
            custom_params=None, min_p=0.0, top_k=1, min_new_tokens=0, logit_bias=None
        ),
        custom_logit_processor=None,
        return_hidden_states=False,
    )
    (reason,) = request_refusals(req, deterministic=False)
    assert word in reason
    req.multimodal_inputs = object()  # ids of images are hashes
    assert bool(request_refusals(req, deterministic=False)) is not bool(ids)


# -- server arguments -----------------------------------------------------------------------------

BAD_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "pp_size": (2, 8),
    "enable_dp_attention": (True,),
    "attn_cp_size": (2,),
    "dcp_size": (4,),
    "disaggregation_mode": ("prefill", "decode"),
    "kv_cache_dtype": ("fp8_e4m3", "fp8_e5m2", "int8"),
    "speculative_eagle_topk": (2, 8),
    "speculative_num_steps": (3,),
    "speculative_accept_threshold_single": (0.5, 0.0),
    "speculative_accept_threshold_acc": (0.9,),
    "speculative_draft_model_quantization": ("fp8",),
    "speculative_adaptive": (True,),
    "enable_unified_memory": (True,),
    "enable_two_batch_overlap": (True,),
    "enable_pdmux": (True,),
    "enable_lora": (True,),
    "enable_hierarchical_cache": (True,),
    "device": ("xpu", "npu", "hpu:0"),
}
SAME_REASON = {"attn_cp_size", "dcp_size"}


@settings(max_examples=150, deadline=None)
@given(
    bad=st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in BAD_ARGUMENTS.items()}
    )
)
def test_every_unsupported_argument_is_refused_whatever_else_is_set(bad: dict[str, Any]) -> None:
    args = SimpleNamespace(speculative_draft_model_path="drafter", device="cpu")
    args.__dict__.update(bad)
    reasons = compat.server_refusals(args)
    expected = len(bad) - (bad.keys() >= SAME_REASON)
    # HiCache is refused on the CPU only.
    expected -= "enable_hierarchical_cache" in bad and args.device != "cpu"
    assert len(reasons) == len(set(reasons)) == expected, reasons


@settings(max_examples=100, deadline=None)
@given(values=st.dictionaries(st.sampled_from(sorted(BAD_ARGUMENTS)), st.none() | st.just(0)))
def test_unset_arguments_are_no_reason(values: dict[str, Any]) -> None:
    values = {name: value for name, value in values.items() if "threshold" not in name}
    args = SimpleNamespace(speculative_draft_model_path="drafter", **{"device": "cpu", **values})
    assert compat.server_refusals(args) == []
