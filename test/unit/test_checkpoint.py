"""The checkpoint folder: exact format, one error for all mismatches, nothing hostile is opened."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from longspark_sglang import checkpoint
from longspark_sglang.checkpoint import CheckpointError, checkpoint_folder, load_state
from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter import LongSparkDrafter
from longspark_sglang.drafter.summary import equicorrelated_bank
from safetensors import safe_open
from safetensors.torch import save_file

TARGET = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "num_hidden_layers": 9,
    "rope_theta": 1e4,
}
QUERY = "global16_raw256_reference.global_query_generator.learned_query"
GATE = "parallel_qwen_layers.1.mlp.gate_proj.weight"
INDEX = "model.safetensors.index.json"


def make_config(**more: Any) -> LongSparkConfig:
    values: dict[str, Any] = {"mask_token_id": 49, "num_layers": 3, "markov_rank": 6, **more}
    return LongSparkConfig.for_target(TARGET, **values)


def tensors(config: LongSparkConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in checkpoint.expected_tensors(config).items()
    }


@pytest.fixture
def config() -> LongSparkConfig:
    return make_config()


@pytest.fixture
def folder(tmp_path: Path, config: LongSparkConfig) -> Path:
    config.save_pretrained(tmp_path)
    save_file(tensors(config), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def rewrite(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path, config: LongSparkConfig) -> dict[str, Any]:
    """Two shards and their index in place of the one file; returns the index."""
    (folder / "model.safetensors").unlink()
    state = tensors(config)
    names = sorted(state)
    parts = {"model-1-of-2.safetensors": names[:11], "model-2-of-2.safetensors": names[11:]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def reasons_of(folder: Path, config: LongSparkConfig) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load_state(folder, config)
    assert str(folder) in str(caught.value)
    for reason in caught.value.reasons:
        assert reason in str(caught.value)
        assert ": " in reason  # says what to do
    return caught.value.reasons


# -- the format


def test_names_and_shapes_of_five_layers() -> None:
    expected = checkpoint.expected_tensors(make_config(num_layers=5))
    assert len(expected) == 65
    h, inner, vocab, rank = 24, 20, 50, 6
    layer = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (64, h),
        "self_attn.k_proj.weight": (32, h),
        "self_attn.v_proj.weight": (32, h),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "self_attn.o_proj.weight": (h, 64),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (inner, h),
        "mlp.up_proj.weight": (inner, h),
        "mlp.down_proj.weight": (h, inner),
    }
    assert expected == {
        "draft_state_encoder.proj.net.0.weight": (h, 5 * h),
        "draft_state_encoder.proj.net.2.weight": (h, h),
        "draft_state_encoder.norm.weight": (h,),
        "parallel_shifted_input.position_embedding.weight": (7, h),
        "parallel_shifted_input.proj.net.0.weight": (h, 2 * h),
        "parallel_shifted_input.proj.net.2.weight": (h, h),
        "parallel_shifted_input.norm.weight": (h,),
        QUERY: (5, 4, 16, 16),
        "parallel_markov_head.markov_w1.weight": (vocab, rank),
        "parallel_markov_head.markov_w2.weight": (vocab, rank),
        **{
            f"parallel_qwen_layers.{i}.{name}": shape
            for i in range(5)
            for name, shape in layer.items()
        },
    }


@pytest.mark.parametrize("layers", [1, 3, 9])
def test_saved_file_is_the_format_to_the_byte(tmp_path: Path, layers: int) -> None:
    config = make_config(
        target_layer_ids=tuple(range(layers)), summary_slots=layers, num_draft_tokens=layers
    )
    drafter = LongSparkDrafter(config)  # float32: saving converts
    checkpoint.save(drafter, config, tmp_path / "made")
    path = tmp_path / "made" / "model.safetensors"
    assert path.stat().st_size == checkpoint.predicted_file_size(config)
    assert sorted(os.listdir(path.parent)) == ["config.json", "model.safetensors"]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(x.shape) for name, x in found.items()} == (
        checkpoint.expected_tensors(config)
    )
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16())


def test_module_of_another_config_is_not_saved(tmp_path: Path, config: LongSparkConfig) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.save(LongSparkDrafter(make_config(num_layers=2)), config, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_interrupted_save_leaves_the_old_file(
    folder: Path, config: LongSparkConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(state: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_file", fails)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(LongSparkDrafter(config), config, folder)
    assert load_state(folder, config)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_load_converts(folder: Path, config: LongSparkConfig, dtype: torch.dtype) -> None:
    state = load_state(folder, config, dtype)
    wanted = tensors(config)
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor.to(dtype))


def test_shards_load_as_one_file_does(folder: Path, config: LongSparkConfig) -> None:
    whole = load_state(folder, config)
    shard(folder, config)
    parts = load_state(folder, config)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


# -- mismatches


def test_all_mismatches_come_at_once(folder: Path, config: LongSparkConfig) -> None:
    state = tensors(config)
    del state["parallel_shifted_input.norm.weight"]
    state["lm_head.weight"] = torch.zeros(50, 24).bfloat16()
    state[GATE] = torch.zeros(21, 24).bfloat16()
    state[QUERY] = state[QUERY].float()
    rewrite(folder, state)
    assert reasons_of(folder, config) == [
        "parallel_shifted_input.norm.weight is missing (shape [24]): the file is of another "
        "drafter, or incomplete",
        "lm_head.weight is surplus: remove it, or set the config keys of the drafter that has it",
        f"{GATE} has shape [21, 24], by config.json it is [20, 24]: check qwen_intermediate_size "
        "and hidden_size",
        f"{QUERY} is stored as F32: convert it to BF16 (bfloat16)",
    ]


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"vocab_size": 51}, "vocab_size"),
        ({"parallel_markov_rank": 7}, "parallel_markov_rank"),
        ({"global_memory_slots": 15}, "global_memory_slots"),
        ({"qwen_num_attention_heads": 6}, "qwen_num_attention_heads"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 8}, "head_dim"),
        ({"qwen_intermediate_size": 21}, "qwen_intermediate_size"),
        ({"hidden_size": 25}, "hidden_size"),
        ({"block_size": 6, "local_draft_rows": 6, "max_accepted_tokens": 7}, "block_size"),
        ({"parallel_mixer_layers": 2, "target_layer_ids": [0, 1]}, "parallel_mixer_layers"),
    ],
)
def test_config_of_another_drafter_is_named(
    folder: Path, config: LongSparkConfig, changed: dict[str, Any], key: str
) -> None:
    other = LongSparkConfig.from_dict({**config.to_dict(), **changed})
    reasons = reasons_of(folder, other)
    assert any(f"check {key}" in reason or f" {key}" in reason for reason in reasons)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_damaged_numbers_are_found(folder: Path, config: LongSparkConfig, value: float) -> None:
    state = tensors(config)
    state[GATE][3, 5] = value
    rewrite(folder, state)
    assert reasons_of(folder, config) == [
        f"{GATE} holds NaN or infinity: the file is damaged, fetch it again"
    ]


def test_fixed_bank_is_checked_in_its_mode_only(folder: Path, config: LongSparkConfig) -> None:
    fixed = make_config(global_query_mode="fixed_equicorrelated")
    assert "off the equicorrelated bank of rho 0.4" in reasons_of(folder, fixed)[0]
    state = tensors(config)
    state[QUERY] = (equicorrelated_bank(fixed) * 7).bfloat16()  # rows are normalised first
    rewrite(folder, state)
    assert torch.equal(load_state(folder, fixed)[QUERY], state[QUERY])
    other = make_config(global_query_mode="fixed_equicorrelated", global_query_equicorrelation=0.42)
    assert "global_query_equicorrelation" in reasons_of(folder, other)[0]


# -- hostile folders


class Bomb:
    """A pickle that leaves a mark when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickle_is_never_opened(folder: Path, config: LongSparkConfig, name: str) -> None:
    mark = folder / "opened"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    reason = reasons_of(folder, config)[0]
    if name == "model.safetensors":
        assert "is damaged or no safetensors file" in reason
    else:
        assert f"only pickle files ({name})" in reason and "convert them" in reason
    assert not mark.exists()


def test_pickle_beside_safetensors_is_ignored(folder: Path, config: LongSparkConfig) -> None:
    mark = folder / "opened"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    assert load_state(folder, config)
    assert not mark.exists()


def damage(path: Path, kind: str) -> None:
    whole = path.read_bytes()
    header_size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + header_size])
    data = whole[8 + header_size :]
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated data":
        path.write_bytes(whole[:-1])
    elif kind == "truncated header":
        path.write_bytes(whole[:100])
    elif kind == "surplus data":
        path.write_bytes(whole + b"\0")
    elif kind == "header length beyond the file":
        path.write_bytes(struct.pack("<Q", 2**62) + whole[8:])
    elif kind == "header no JSON":
        path.write_bytes(struct.pack("<Q", 16) + b"{" * 16 + data)
    else:
        begin, end = header[GATE]["data_offsets"]
        header[GATE] |= {
            "offsets overlap": {"data_offsets": [begin - 2, end]},
            "offsets outside": {"data_offsets": [begin, end + 10**9]},
            "shape larger than data": {"shape": [20, 24000]},
            "unknown dtype": {"dtype": "X16"},
        }[kind]
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "kind",
    [
        "empty", "truncated data", "truncated header", "surplus data",
        "header length beyond the file", "header no JSON", "offsets overlap", "offsets outside",
        "shape larger than data", "unknown dtype",
    ],
)  # fmt: skip
def test_damaged_file_is_refused(folder: Path, config: LongSparkConfig, kind: str) -> None:
    damage(folder / "model.safetensors", kind)
    reason = reasons_of(folder, config)[0]
    assert reason.startswith("model.safetensors is damaged or no safetensors file (")
    assert reason.endswith("): fetch it again")


def test_every_damaged_shard_is_named(folder: Path, config: LongSparkConfig) -> None:
    shard(folder, config)
    for file in ("model-1-of-2.safetensors", "model-2-of-2.safetensors"):
        damage(folder / file, "empty")
    assert [reason.split()[0] for reason in reasons_of(folder, config)] == [
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/{parent}/outside.safetensors",
        "..",
        "sub/../../outside.safetensors",
        "sub\\outside.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "outside.safetensors\0",
        "outside.safetensors\n",
        "",
    ],
)
def test_index_cannot_name_files_outside(
    tmp_path: Path, folder: Path, config: LongSparkConfig, name: str
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    index = shard(folder, config)
    for file in set(index["weight_map"].values()):
        (folder / file).rename(inside / file)
    # The file outside is a good one: only its place is wrong.
    save_file(tensors(config), folder / "outside.safetensors")
    name = name.replace("/{parent}", str(folder))
    index["weight_map"][GATE] = name
    (inside / INDEX).write_text(json.dumps(index))
    reasons = reasons_of(inside, config)
    assert any(repr(name) in r and "only .safetensors files inside" in r for r in reasons)


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", '{"weight_map": null}'],
)
def test_index_without_a_map(folder: Path, config: LongSparkConfig, content: str) -> None:
    shard(folder, config)
    (folder / INDEX).write_text(content)
    assert INDEX in reasons_of(folder, config)[0]


def test_index_and_shards_must_agree(folder: Path, config: LongSparkConfig) -> None:
    index = shard(folder, config)
    moved = index["weight_map"]
    moved[GATE] = ({"model-1-of-2.safetensors", "model-2-of-2.safetensors"} - {moved[GATE]}).pop()
    (folder / INDEX).write_text(json.dumps(index))
    reasons = reasons_of(folder, config)
    assert any(f"places {GATE} in" in reason and "which lacks it" in reason for reason in reasons)
    assert any(f"holds {GATE}, which" in reason for reason in reasons)

    moved[GATE] = "model-3-of-2.safetensors"
    moved[QUERY] = 5
    (folder / INDEX).write_text(json.dumps(index))
    reason = reasons_of(folder, config)[0]
    assert "'model-3-of-2.safetensors', which is not there: fetch it" in reason
    assert "names '5'" in reason


def test_folder_without_weights(folder: Path, config: LongSparkConfig) -> None:
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    assert f"no {INDEX}" in reasons_of(folder, config)[0]
    (folder / "model-1-of-1.safetensors").unlink()
    assert "neither model.safetensors nor" in reasons_of(folder, config)[0]
    (folder / "model.safetensors").mkdir()
    assert reasons_of(folder, config)


# -- where a drafter is found


@pytest.mark.parametrize("name", ["/no/such/folder", "./absent", "../a/b", "a/b/c", "", "a b/c"])
def test_no_folder_and_no_hub_id(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint_folder(name)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="give the folder that holds"):
        checkpoint_folder(folder / "model.safetensors")


def test_hub_id_fetches_safetensors_and_json_only(
    folder: Path, config: LongSparkConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert LongSparkConfig.from_pretrained("Hehy/LongSpark-Qwen3-4B", revision="abc") == config
    assert load_state("Hehy/LongSpark-Qwen3-4B", config, revision="abc")
    assert calls == [
        ("Hehy/LongSpark-Qwen3-4B", {"revision": "abc", "allow_patterns": ["*.json"]}),
        (
            "Hehy/LongSpark-Qwen3-4B",
            {"revision": "abc", "allow_patterns": ["*.json", "*.safetensors"]},
        ),
    ]
    calls.clear()
    checkpoint_folder(folder, revision="abc")  # a folder is used as it is
    assert calls == []


def test_hub_failure_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError) as caught:
        checkpoint_folder("Hehy/Absent", revision="v2")
    message = str(caught.value)
    for words in (
        "'Hehy/Absent'",
        "at revision 'v2'",
        "ConnectionError: offline",
        "give the folder",
    ):
        assert words in message
