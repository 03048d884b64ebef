"""The released checkpoint format: which tensors a drafter's folder holds, read and written.

A folder has ``config.json`` and ``model.safetensors`` (or shards with
``model.safetensors.index.json``). All tensors are bfloat16, linear weights are stored [out, in],
there are no biases. The embedding, the final norm and the head are the target's; rope frequencies
are rebuilt, so neither is in the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from longspark_sglang.config import LongSparkConfig, LongSparkError, read_json_object

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
STORED_DTYPE = torch.bfloat16

_STORED_DTYPE_CODE = "BF16"  # how a safetensors header spells it
_METADATA = {"format": "pt"}
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LEARNED_QUERY = "global16_raw256_reference.global_query_generator.learned_query"
# Row-normalised Gram matrix of a fixed query bank, as the release checks it; bfloat16 fits easily.
_EQUICORRELATION_TOLERANCE = 5e-3

# Tensor name -> (shape, dtype code) of one safetensors file.
_Header = dict[str, tuple[tuple[int, ...], str]]


class CheckpointError(LongSparkError):
    """A drafter folder cannot be used; each reason names the file or tensor and the fix."""


def expected_tensors(config: LongSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the drafter, all bfloat16 (65 of them for 5 layers)."""
    h, d, inner = config.hidden_size, config.head_dim, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layers, slots, rank = config.num_layers, config.num_draft_tokens, config.markov_rank
    tensors: dict[str, tuple[int, ...]] = {
        "draft_state_encoder.proj.net.0.weight": (h, layers * h),
        "draft_state_encoder.proj.net.2.weight": (h, h),
        "draft_state_encoder.norm.weight": (h,),
        "parallel_shifted_input.position_embedding.weight": (slots, h),
        "parallel_shifted_input.proj.net.0.weight": (h, 2 * h),
        "parallel_shifted_input.proj.net.2.weight": (h, h),
        "parallel_shifted_input.norm.weight": (h,),
    }
    for i in range(layers):
        layer = f"parallel_qwen_layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": (h,),
            f"{layer}.self_attn.q_proj.weight": (heads * d, h),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * d, h),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * d, h),
            f"{layer}.self_attn.q_norm.weight": (d,),
            f"{layer}.self_attn.k_norm.weight": (d,),
            f"{layer}.self_attn.o_proj.weight": (h, heads * d),
            f"{layer}.post_attention_layernorm.weight": (h,),
            f"{layer}.mlp.gate_proj.weight": (inner, h),
            f"{layer}.mlp.up_proj.weight": (inner, h),
            f"{layer}.mlp.down_proj.weight": (h, inner),
        }
    tensors |= {
        _LEARNED_QUERY: (layers, heads, config.summary_slots, d),
        "parallel_markov_head.markov_w1.weight": (config.vocab_size, rank),
        "parallel_markov_head.markov_w2.weight": (config.vocab_size, rank),
    }
    return tensors


def parameter_count(config: LongSparkConfig) -> int:
    """Parameters of the drafter, those borrowed from the target not counted."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def predicted_file_size(config: LongSparkConfig) -> int:
    """Bytes of ``model.safetensors`` as :func:`save` writes it (one file).

    8 bytes of header length, a compact JSON header (names sorted) padded to 8 bytes, the data.
    """
    header: dict[str, object] = {"__metadata__": _METADATA}
    offset = 0
    for name, shape in sorted(expected_tensors(config).items()):
        end = offset + math.prod(shape) * STORED_DTYPE.itemsize
        header[name] = {"dtype": _STORED_DTYPE_CODE, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + math.ceil(length / 8) * 8 + offset


def checkpoint_folder(
    path_or_hub_id: str | PathLike[str], revision: str | None = None, with_weights: bool = True
) -> Path:
    """The local folder of a drafter: a folder as it is, a hub id after fetching it.

    Of a hub repository only ``*.json`` and ``*.safetensors`` files are fetched.

    Raises CheckpointError when there is neither such a folder nor such a repository.
    """
    name = os.fspath(path_or_hub_id)
    if os.path.isdir(name):
        return Path(name)
    subject = f"no drafter at {name!r}"
    if os.path.exists(name):
        raise CheckpointError(subject, ["it is a file: give the folder that holds config.json"])
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise CheckpointError(subject, ["no such folder, and no hub id (owner/name)"])
    import huggingface_hub

    patterns = ["*.json", "*.safetensors"] if with_weights else ["*.json"]
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns)
        )
    # The hub client lets through its own errors, its HTTP library's and the operating system's.
    except Exception as error:
        at_revision = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            subject,
            [
                f"there is no such folder, and fetching it from the hub{at_revision} failed "
                f"({type(error).__name__}: {error}): check the name, or download it and give the "
                "folder"
            ],
        ) from error


def load_state(
    path_or_hub_id: str | PathLike[str],
    config: LongSparkConfig,
    dtype: torch.dtype = STORED_DTYPE,
    revision: str | None = None,
) -> dict[str, torch.Tensor]:
    """Read a drafter's tensors, on the CPU, converted to ``dtype``.

    Only safetensors files are read: a pickle can run code when it is opened.

    Raises:
        CheckpointError: one error listing every missing, surplus, misshapen, wrongly typed or
            non-finite tensor, or what makes the files unreadable.
    """
    folder = checkpoint_folder(path_or_hub_id, revision)
    subject = f"the drafter in {os.fspath(path_or_hub_id)!r} cannot be loaded"
    files = _weight_files(folder, subject)
    reasons: list[str] = []
    headers: dict[str, _Header] = {}
    for file in sorted(set(files.values()) if files else {WEIGHTS_NAME}):
        try:
            headers[file] = _read_header(folder / file)
        except (OSError, SafetensorError, ValueError) as error:
            reasons.append(f"{file} is damaged or no safetensors file ({error}): fetch it again")
    if reasons:
        raise CheckpointError(subject, reasons)

    if files is None:
        files = dict.fromkeys(headers[WEIGHTS_NAME], WEIGHTS_NAME)
    reasons = _index_reasons(files, headers)
    found = {name: headers[file][name] for name, file in files.items() if name in headers[file]}
    reasons += _mismatches(found, config)
    if reasons:
        raise CheckpointError(subject, reasons)

    state: dict[str, torch.Tensor] = {}
    for name, tensor in _read_tensors(folder, files):
        if not torch.isfinite(tensor).all():
            reasons.append(f"{name} holds NaN or infinity: the file is damaged, fetch it again")
        state[name] = tensor.to(dtype)
    if config.global_query_mode == "fixed_equicorrelated" and not reasons:
        reasons = _query_bank_reasons(state[_LEARNED_QUERY], config)
    if reasons:
        raise CheckpointError(subject, reasons)
    return state


def save(model: nn.Module, config: LongSparkConfig, folder: str | PathLike[str]) -> None:
    """Write ``config.json`` and ``model.safetensors`` (bfloat16, one file) into ``folder``.

    Raises CheckpointError when the module's tensors are not the drafter's of ``config``.
    """
    tensors = model.state_dict()
    headers = {name: (tuple(tensor.shape), _STORED_DTYPE_CODE) for name, tensor in tensors.items()}
    reasons = _mismatches(headers, config)
    if reasons:
        raise CheckpointError("this module cannot be saved as a LongSpark drafter", reasons)
    folder = Path(folder)
    config.save_pretrained(folder)
    # Written aside and moved, so that a reader or a crash never sees half a file.
    unfinished = folder / f".{WEIGHTS_NAME}.{os.getpid()}"
    try:
        save_file(
            {
                name: tensor.detach().to("cpu", STORED_DTYPE).contiguous()
                for name, tensor in tensors.items()
            },
            unfinished,
            metadata=_METADATA,
        )
        unfinished.replace(folder / WEIGHTS_NAME)
    finally:
        unfinished.unlink(missing_ok=True)


def _weight_files(folder: Path, subject: str) -> dict[str, str] | None:
    """Tensor name -> file name as the index says; None when all tensors are in one file."""
    if (folder / WEIGHTS_NAME).is_file():
        return None
    if (folder / INDEX_NAME).is_file():
        try:
            return _read_index(folder)
        except ValueError as error:
            raise CheckpointError(subject, [str(error)]) from error
    here = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in here if name.endswith(_PICKLE_SUFFIXES)]
    others = [name for name in here if name.endswith(".safetensors")]
    if others:
        reason = (
            f"it has {', '.join(others)} but no {INDEX_NAME}: fetch the index, or name a single "
            f"file {WEIGHTS_NAME}"
        )
    elif pickles:
        reason = (
            f"it has only pickle files ({', '.join(pickles)}), which can run code when opened and "
            f"are never read: convert them to {WEIGHTS_NAME}"
        )
    else:
        reason = f"it has neither {WEIGHTS_NAME} nor {INDEX_NAME}: fetch the weights"
    raise CheckpointError(subject, [reason])


def _read_index(folder: Path) -> dict[str, str]:
    """The index's tensor name -> file name; ValueError lists all that is wrong with it."""
    weight_map = read_json_object(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{INDEX_NAME} has no weight_map object with tensors: fetch it again")
    reasons = []
    for file in sorted({str(value) for value in weight_map.values()}):
        # A plain name only: with a separator or a leading dot it could name a file outside.
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            reasons.append(
                f"{INDEX_NAME} names {file!r}: only .safetensors files inside the folder are read"
            )
        elif not (folder / file).is_file():
            reasons.append(f"{INDEX_NAME} names {file!r}, which is not there: fetch it")
    if reasons:
        raise ValueError("; ".join(reasons))
    return weight_map


def _read_header(path: Path) -> _Header:
    with safe_open(path, framework="pt") as file:
        return {
            name: (tuple(view.get_shape()), view.get_dtype())
            for name in file.keys()  # noqa: SIM118  (the file object is no mapping)
            for view in [file.get_slice(name)]
        }


def _read_tensors(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file_name in sorted(set(files.values())):
        with safe_open(folder / file_name, framework="pt") as file:
            for name in sorted(name for name, home in files.items() if home == file_name):
                yield name, file.get_tensor(name)


def _index_reasons(files: Mapping[str, str], headers: Mapping[str, _Header]) -> list[str]:
    """Where the index and the shards disagree."""
    reasons = [
        f"{INDEX_NAME} places {name} in {file}, which lacks it: fetch both again"
        for name, file in files.items()
        if name not in headers[file]
    ]
    reasons += [
        f"{file} holds {name}, which {INDEX_NAME} does not place there: fetch both again"
        for file, header in headers.items()
        for name in header
        if files.get(name) != file
    ]
    return reasons


def _mismatches(found: _Header, config: LongSparkConfig) -> list[str]:
    """Every difference between the tensors found and those of ``config``."""
    expected = expected_tensors(config)
    reasons = [
        f"{name} is missing (shape {list(shape)}): the file is of another drafter, or incomplete"
        for name, shape in expected.items()
        if name not in found
    ]
    reasons += [
        f"{name} is surplus: remove it, or set the config keys of the drafter that has it"
        for name in sorted(found.keys() - expected.keys())
    ]
    for name, shape in expected.items():
        if name not in found:
            continue
        found_shape, found_dtype = found[name]
        if found_shape != shape:
            reasons.append(
                f"{name} has shape {list(found_shape)}, by config.json it is {list(shape)}: "
                f"{_shape_hint(name)}"
            )
        if found_dtype != _STORED_DTYPE_CODE:
            reasons.append(
                f"{name} is stored as {found_dtype}: convert it to {_STORED_DTYPE_CODE} (bfloat16)"
            )
    return reasons


def _shape_hint(name: str) -> str:
    """The config keys that decide a tensor's shape."""
    for part, keys in (
        ("markov", "vocab_size and parallel_markov_rank"),
        ("learned_query", "parallel_mixer_layers, qwen_num_attention_heads, global_memory_slots"),
        ("position_embedding", "block_size and hidden_size"),
        ("self_attn.q_norm", "head_dim"),
        ("self_attn.k_norm", "head_dim"),
        ("self_attn.k_", "num_key_value_heads, head_dim and hidden_size"),
        ("self_attn.v_", "num_key_value_heads, head_dim and hidden_size"),
        ("self_attn", "qwen_num_attention_heads, head_dim and hidden_size"),
        ("mlp", "qwen_intermediate_size and hidden_size"),
        ("draft_state_encoder.proj.net.0", "parallel_mixer_layers and hidden_size"),
    ):
        if part in name:
            return f"check {keys}"
    return "check hidden_size"


def _query_bank_reasons(query: torch.Tensor, config: LongSparkConfig) -> list[str]:
    """A fixed bank's rows have one common cosine: Gram matrix (1 - rho) I + rho 11^T per head."""
    rows = nn.functional.normalize(query.double(), dim=-1)
    gram = rows @ rows.transpose(-1, -2)
    rho = config.global_query_equicorrelation
    slots = config.summary_slots
    wanted = torch.full((slots, slots), rho, dtype=torch.float64).fill_diagonal_(1.0)
    worst = (gram - wanted).abs().max().item()
    if worst <= _EQUICORRELATION_TOLERANCE:
        return []
    return [
        f"{_LEARNED_QUERY} is off the equicorrelated bank of rho {rho} by {worst:.3g}: set "
        "global_query_mode to 'learned', or global_query_equicorrelation to the bank's"
    ]
