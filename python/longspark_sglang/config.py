"""The released LongSpark ``config.json``, field by field, and what it asks of a target.

One definition of every constant and convention lives here:

* **block**: ``block_size`` (K) counts the slots of the block, which is also the number of draft
  tokens per round. The anchor sits in slot 0 and is *not* an extra slot; the target verifies
  K + 1 rows.
* **accept length** (tau): tokens emitted per round, bonus token included, hence at most K + 1.
* **committed**: rows whose K/V is final; the anchor's row is not committed at proposal time.
* **log-normaliser**: natural logarithm, everywhere.

This module needs neither torch nor transformers: tools can read a config without loading either.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from longspark_sglang.target import TargetShape, is_int, is_real

SUPPORTED_HEAD_DIMS = (64, 128, 256)
MAX_BLOCK_SIZE = 16
MAX_SUMMARY_SLOTS = 32
MAX_WINDOW = 1024
MAX_HEAD_GROUP = 16

TRAINING_OBJECTIVES = (
    "ce",
    "kl",
    "kd",
    "rkl",
    "dflash_rkl",
    "dspark_l1",
    "lk_alpha",
    "lk_hybrid",
    "on_policy_ce",
    "on_policy_kl",
)

# Written by Hugging Face's config base class around any model's fields; they say nothing of ours.
_BOOKKEEPING_KEYS = frozenset(
    (
        "_name_or_path",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "eos_token_id",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torchscript",
        "transformers_version",
        "use_cache",
    )
)
_JSON_SIZE_LIMIT = 16 * 2**20


class LongSparkError(ValueError):
    """Bad input, with all reasons at once. ``reasons`` is the list that the message prints."""

    def __init__(self, subject: str, reasons: Sequence[str]):
        self.subject = subject
        self.reasons = list(reasons)
        count = "1 reason" if len(self.reasons) == 1 else f"{len(self.reasons)} reasons"
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{subject} ({count}):{lines}")


class ConfigError(LongSparkError):
    """The drafter's config.json cannot be used; each reason names the key and the fix."""


def read_json_object(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a small JSON object from a folder of any origin; ValueError gives the reason."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > _JSON_SIZE_LIMIT:
            raise ValueError(f"{path.name} has {size} bytes; a config or index is far smaller")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path.name} must hold one JSON object: it holds a {type(content).__name__}"
        )
    return content


# Annotation text -> (what to say, test): with postponed annotations a field's type is its text.
_FIELD_TYPES = {
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "int": ("an integer", is_int),
    "float": ("a finite number", is_real),
    "str": ("a string", lambda v: isinstance(v, str)),
    "tuple[int, ...]": (
        "a list of integers",
        lambda v: isinstance(v, tuple) and all(is_int(x) for x in v),
    ),
    "tuple[str, ...]": (
        "a list of strings",
        lambda v: isinstance(v, tuple) and all(isinstance(x, str) for x in v),
    ),
}


def layer_ids_of_policy(policy: str, num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Tapped layer ids that a named policy of the release (key target_layer_policy) stands for.

    ``uniform_<n>``: round(i * (N - 1) / (n - 1)) for i = 0..n-1, halves to the even neighbour;
    ``last_<n>``: the last n layers. A literal ``n`` in place of the number means the drafter's
    layer count.

    Raises ValueError when the policy is unknown or asks for more layers than there are.
    """
    match = re.fullmatch(r"(uniform|last)_(n|[0-9]{1,4})", policy)
    if match is None:
        raise ValueError(
            f"target_layer_policy {policy!r} is unknown: use 'uniform_<n>' or 'last_<n>'"
        )
    count = num_layers if match[2] == "n" else int(match[2])
    if not 1 <= count <= num_target_layers:
        raise ValueError(
            f"target_layer_policy {policy!r} asks for {count} of {num_target_layers} target layers"
        )
    if match[1] == "last":
        return tuple(range(num_target_layers - count, num_target_layers))
    if count == 1:
        raise ValueError(
            f"target_layer_policy {policy!r} has no spacing: list target_layer_ids instead"
        )
    # Python's round() takes halves to the even neighbour, and a quotient that is a half is exact.
    return tuple(round(i * (num_target_layers - 1) / (count - 1)) for i in range(count))


@dataclass(frozen=True)
class LongSparkConfig:
    """A drafter's ``config.json``: same keys, same class defaults as the release.

    The class defaults describe another mode of the original class ("markov"); they are kept so that
    a file that omits a key means what it meant there. A usable config therefore always names its
    mode and shapes. Build one for a target with :meth:`for_target`, read one with
    :meth:`from_pretrained`.

    Structural keys (mode, layout) have one legal value. Sizes are free within what the operators
    support: block 1..16, summary slots 1..32, window 1..1024, query heads per K/V head 1..16, head
    dim 64, 128 or 256 (smaller even head dims run on the reference operators and exist for tests).

    Raises:
        ConfigError: listing every bad key with its fix.
    """

    # -- what the file is
    model_type: str = "draftfreekv"
    architectures: tuple[str, ...] | None = None
    dtype: str | None = None  # of the stored tensors; the file's key may also be torch_dtype
    draft_mode: str = "markov"  # must be "parallel_shifted_qwen"
    global16_raw256_enabled: bool = False  # must be true: summary + window

    # -- the block: K slots = K draft tokens, slot 0 holds the anchor
    block_size: int = 8
    local_draft_rows: int = 7  # = block_size
    max_accepted_tokens: int = 8  # = block_size + 1: accept length at most, bonus included
    mask_token_id: int | None = None  # token of slots 1..K-1, a row of the target's own embedding

    # -- tapped layers, zero-based; the list's order is the order of the boundary vectors.
    #    The boundary of the target's last layer is taken after the target's final norm.
    target_layer_ids: tuple[int, ...] | None = None
    target_layer_policy: str | None = None  # used only where target_layer_ids is null
    num_target_layers: int | None = None
    target_model_name_or_path: str | None = None
    parallel_mixer_layers: int = 5  # drafter layers = tapped layers

    # -- shapes shared with the target
    hidden_size: int = 4096
    num_key_value_heads: int = 32
    head_dim: int = 128
    vocab_size: int = 32000
    qwen_num_attention_heads: int | None = None
    qwen_rope_theta: float = 1e6  # the target's base: the drafter reads the target's rotated keys

    # -- shapes of the drafter alone
    qwen_intermediate_size: int | None = None
    qwen_rms_norm_eps: float = 1e-6
    parallel_markov_rank: int = 0
    parallel_markov_head_type: str = "vanilla"

    # -- summary and window
    global_memory_slots: int = 16  # R, per query head
    raw_target_rows: int = 256  # W, last committed rows read as cached
    global_memory_source_window: str = "full"
    global_checkpoint_compatibility: str = "retrain_required"
    global_query_mode: str = "learned"  # or "fixed_equicorrelated"; inference is the same
    global_query_equicorrelation: float = 0.4  # of the fixed mode
    global_query_slot_mass_mode: str = "system"  # without effect: the release never adds the bias
    target_kv_memory_layout: str = "direct"
    target_kv_window_size: Any = None  # must be null
    memory_output_slots: Any = None  # must be null
    memory_source_window: Any = None  # must be null

    training_objective: str = "ce"

    # -- keys of the original class's other modes: read, kept, without effect here
    adapter_rank: Any = 512
    adapter_alpha: Any = 512
    transition_rank: Any = None
    transition_alpha: Any = None
    parallel_mixer_rank: Any = None
    parallel_mixer_alpha: Any = None
    parallel_mixer_num_heads: Any = 8
    target_kv_memory_query_rank: Any = 16
    memory_query_mode: Any = None
    memory_query_residual_rank: Any = None
    memory_external_key_mode: Any = None
    memory_attention_backend: Any = None
    memory_anchor_policy: Any = None
    qwen_gradient_checkpointing: Any = None
    qwen_initialize_from_target: Any = None
    # xpress_* and Hugging Face's own bookkeeping keys
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("target_layer_ids", "architectures"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", self.dtype.removeprefix("torch."))
        reasons = self._type_reasons()
        if not reasons:
            reasons = self._resolve_layer_ids()
            reasons += self._mode_reasons() + self._size_reasons() + self._layer_id_reasons()
        if reasons:
            raise ConfigError("this LongSpark config cannot be used", reasons)

    # -- checks ------------------------------------------------------------------------------------

    def _type_reasons(self) -> list[str]:
        reasons = []
        for item in dataclasses.fields(self):
            annotation = str(item.type)
            base = annotation.removesuffix(" | None")
            if base not in _FIELD_TYPES:
                continue
            value = getattr(self, item.name)
            if value is None and base != annotation:
                continue
            expected, accepts = _FIELD_TYPES[base]
            if not accepts(value):
                reasons.append(f"{item.name} must be {expected}, not {value!r}")
        for key in self.extra:
            if not _is_ignored_key(key):
                reasons.append(f"extra key {key!r} is not one of the release's keys")
        return reasons

    def _resolve_layer_ids(self) -> list[str]:
        if self.target_layer_ids is not None:
            return []
        if self.target_layer_policy is None or self.num_target_layers is None:
            return [
                "target_layer_ids is missing: list the tapped target layers, or give both "
                "target_layer_policy and num_target_layers"
            ]
        try:
            ids = layer_ids_of_policy(
                self.target_layer_policy, self.num_target_layers, self.parallel_mixer_layers
            )
        except ValueError as error:
            return [str(error)]
        object.__setattr__(self, "target_layer_ids", ids)
        return []

    def _mode_reasons(self) -> list[str]:
        only_values = {
            "model_type": "draftfreekv",
            "draft_mode": "parallel_shifted_qwen",
            "global16_raw256_enabled": True,
            "parallel_markov_head_type": "vanilla",
            "global_memory_source_window": "full",
            "global_checkpoint_compatibility": "retrain_required",
            "target_kv_memory_layout": "direct",
            "target_kv_window_size": None,
            "memory_output_slots": None,
            "memory_source_window": None,
        }
        reasons = [
            f"{name} is {_as_json(getattr(self, name))}: set it to {_as_json(value)} "
            "(other values select another drafter)"
            for name, value in only_values.items()
            if getattr(self, name) != value
        ]
        if self.dtype not in (None, "bfloat16"):
            reasons.append(f"dtype is {self.dtype!r}: released tensors are 'bfloat16'")
        if self.global_query_mode not in ("learned", "fixed_equicorrelated"):
            reasons.append(
                f"global_query_mode is {self.global_query_mode!r}: use 'learned' or "
                "'fixed_equicorrelated'"
            )
        if self.training_objective not in TRAINING_OBJECTIVES:
            reasons.append(
                f"training_objective is {self.training_objective!r}: use one of "
                f"{', '.join(TRAINING_OBJECTIVES)}"
            )
        return reasons

    def _size_reasons(self) -> list[str]:
        reasons = []

        def check_range(name: str, low: int, high: int) -> bool:
            value = getattr(self, name)
            if value is None:
                reasons.append(f"{name} is missing: it is required by this drafter")
            elif not low <= value <= high:
                reasons.append(f"{name} is {value}: it must lie in {low}..{high}")
            return value is not None and low <= value <= high

        # Token and row ids are int32 in the operators.
        id_limit = 2**31 - 1
        check_range("hidden_size", 1, id_limit)
        check_range("qwen_intermediate_size", 1, id_limit)
        check_range("parallel_mixer_layers", 1, 1024)
        check_range("parallel_markov_rank", 1, id_limit)
        check_range("global_memory_slots", 1, MAX_SUMMARY_SLOTS)
        check_range("raw_target_rows", 1, MAX_WINDOW)
        if check_range("vocab_size", 1, id_limit):
            check_range("mask_token_id", 0, self.vocab_size - 1)
        if check_range("block_size", 1, MAX_BLOCK_SIZE):
            if self.local_draft_rows != self.block_size:
                reasons.append(
                    f"local_draft_rows is {self.local_draft_rows}: it must equal block_size "
                    f"{self.block_size}"
                )
            if self.max_accepted_tokens != self.block_size + 1:
                reasons.append(
                    f"max_accepted_tokens is {self.max_accepted_tokens}: set it to "
                    f"block_size + 1 = {self.block_size + 1}"
                )
        heads_good = check_range("qwen_num_attention_heads", 1, id_limit)
        if check_range("num_key_value_heads", 1, id_limit) and heads_good:
            heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
            if heads % kv_heads:
                reasons.append(
                    f"qwen_num_attention_heads {heads} is not a multiple of num_key_value_heads "
                    f"{kv_heads}"
                )
            elif heads // kv_heads > MAX_HEAD_GROUP:
                reasons.append(
                    f"qwen_num_attention_heads {heads} over num_key_value_heads {kv_heads} makes "
                    f"groups of {heads // kv_heads}: at most {MAX_HEAD_GROUP} are supported"
                )
        dim = self.head_dim
        if not (dim in SUPPORTED_HEAD_DIMS or (0 < dim < SUPPORTED_HEAD_DIMS[0] and dim % 2 == 0)):
            reasons.append(
                f"head_dim is {dim}: use {', '.join(map(str, SUPPORTED_HEAD_DIMS))} "
                "(or, for tests on the reference operators, an even number below 64)"
            )
        if self.qwen_rope_theta <= 0:
            reasons.append(f"qwen_rope_theta is {self.qwen_rope_theta}: it must be positive")
        if self.qwen_rms_norm_eps <= 0:
            reasons.append(f"qwen_rms_norm_eps is {self.qwen_rms_norm_eps}: it must be positive")
        # Outside these bounds (1-rho) I + rho 11^T is no Gram matrix of R independent vectors.
        if self.global_query_mode == "fixed_equicorrelated" and not (
            self.global_query_equicorrelation * max(1, self.global_memory_slots - 1) > -1
            and self.global_query_equicorrelation < 1
        ):
            reasons.append(
                f"global_query_equicorrelation is {self.global_query_equicorrelation}: it must "
                "lie between -1/(slots-1) and 1"
            )
        if self.global_query_mode == "fixed_equicorrelated" and self.global_memory_slots > dim:
            reasons.append(
                f"global_memory_slots {self.global_memory_slots} exceeds head_dim {dim}: no fixed "
                "bank exists, set global_query_mode to 'learned'"
            )
        return reasons

    def _layer_id_reasons(self) -> list[str]:
        reasons = []
        total = self.num_target_layers
        if total is not None and total < 1:
            reasons.append(f"num_target_layers is {total}: it must be positive, or null")
        ids = self.target_layer_ids
        if ids is None:
            return reasons
        if len(ids) != self.parallel_mixer_layers:
            reasons.append(
                f"target_layer_ids {list(ids)} lists {len(ids)} layers: parallel_mixer_layers is "
                f"{self.parallel_mixer_layers} and the two must agree"
            )
        if len(set(ids)) != len(ids):
            reasons.append(f"target_layer_ids {list(ids)} repeats a layer: each is tapped once")
        out_of_range = [i for i in ids if i < 0 or (total is not None and total > 0 and i >= total)]
        if out_of_range:
            allowed = f"0..num_target_layers-1 = 0..{total - 1}" if total else "0 or more"
            reasons.append(f"target_layer_ids {out_of_range} are out of range: use {allowed}")
        return reasons

    # -- derived -----------------------------------------------------------------------------------

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Zero-based target layer of each drafter layer (``target_layer_ids``, resolved)."""
        assert self.target_layer_ids is not None  # established by __post_init__
        return self.target_layer_ids

    @property
    def num_layers(self) -> int:
        """L: drafter layers = tapped target layers."""
        return self.parallel_mixer_layers

    @property
    def num_draft_tokens(self) -> int:
        """K: draft tokens per round = slots of the block."""
        return self.block_size

    @property
    def verify_width(self) -> int:
        """K + 1: rows that the target verifies, the anchor and the drafts."""
        return self.block_size + 1

    @property
    def summary_slots(self) -> int:
        """R: summary slots per query head."""
        return self.global_memory_slots

    @property
    def window(self) -> int:
        """W: the most committed rows that the drafter reads as cached."""
        return self.raw_target_rows

    @property
    def num_attention_heads(self) -> int:
        """Hq: query heads of drafter and target."""
        assert self.qwen_num_attention_heads is not None  # established by __post_init__
        return self.qwen_num_attention_heads

    @property
    def intermediate_size(self) -> int:
        """I: width of the drafter's MLP."""
        assert self.qwen_intermediate_size is not None  # established by __post_init__
        return self.qwen_intermediate_size

    @property
    def mask_token(self) -> int:
        """Token id of slots 1..K-1."""
        assert self.mask_token_id is not None  # established by __post_init__
        return self.mask_token_id

    @property
    def head_group(self) -> int:
        """g = Hq / Hkv: query heads that share one K/V head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def markov_rank(self) -> int:
        """r: rank of the bigram correction."""
        return self.parallel_markov_rank

    @property
    def summary_bytes_per_request(self) -> int:
        """Bytes of one request's summary: L * Hq * R * (d + 1) fp32 values and log-normalisers."""
        slots = self.num_layers * self.num_attention_heads * self.summary_slots
        return slots * (self.head_dim + 1) * 4

    def state_bytes_per_request(self, tp_size: int = 1, boundary_itemsize: int = 2) -> int:
        """Bytes that one request keeps on one device when drafter and target share it.

        The summary is sharded over query heads; the boundary (L * h numbers of
        ``boundary_itemsize`` bytes) is whole on each rank. The window is read in place, at no cost.

        Raises ValueError when the query heads do not divide by ``tp_size``.
        """
        if tp_size < 1 or self.num_attention_heads % tp_size:
            raise ValueError(
                f"tp_size {tp_size} does not divide {self.num_attention_heads} query heads"
            )
        boundary = self.num_layers * self.hidden_size * boundary_itemsize
        return self.summary_bytes_per_request // tp_size + boundary

    # -- files -------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LongSparkConfig:
        """Build from a config.json's object; ConfigError lists unknown keys and bad values."""
        values = dict(content)
        reasons = []
        if "torch_dtype" in values:  # the older spelling of dtype
            old = values.pop("torch_dtype")
            if values.setdefault("dtype", old) != old:
                reasons.append(f"dtype {values['dtype']!r} and torch_dtype {old!r} disagree")
        fields = {item.name for item in dataclasses.fields(cls)} - {"extra"}
        known: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in values.items():
            if key in fields:
                known[key] = value
            elif _is_ignored_key(key):
                extra[key] = value
            else:
                close = difflib.get_close_matches(str(key), sorted(fields), n=1)
                hint = f"did you mean {close[0]!r}?" if close else "remove it"
                reasons.append(f"unknown key {key!r}: {hint}")
        try:
            config = cls(**known, extra=extra)
        except ConfigError as error:
            reasons += error.reasons
        if reasons:
            raise ConfigError("this LongSpark config cannot be used", reasons)
        return config

    @classmethod
    def from_json_file(cls, path: str | PathLike[str]) -> LongSparkConfig:
        """Read a config.json. Raises ConfigError naming the file."""
        try:
            return cls.from_dict(read_json_object(path))
        except ConfigError as error:
            raise ConfigError(f"{path} cannot be used", error.reasons) from error
        except ValueError as error:
            raise ConfigError(f"{path} cannot be used", [str(error)]) from error

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | PathLike[str], revision: str | None = None
    ) -> LongSparkConfig:
        """Read the config of a drafter folder or hub id (of which only the JSON files are fetched).

        Raises CheckpointError when there is no such folder or repository, ConfigError when its
        config.json is missing or unusable.
        """
        # Imported here because that module needs torch and this one must not.
        from longspark_sglang.checkpoint import checkpoint_folder

        return cls.from_json_file(
            checkpoint_folder(path_or_hub_id, revision, with_weights=False) / "config.json"
        )

    def to_dict(self) -> dict[str, Any]:
        """The config.json object: every key this mode reads, and others where they were given."""
        result: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            if item.name == "extra":
                continue
            value = getattr(self, item.name)
            # Any marks the keys of other modes. An unset optional key is left out rather than
            # written as null: the original class may know no null for it.
            if value is None or (item.type == "Any" and value == item.default):
                continue
            result[item.name] = list(value) if isinstance(value, tuple) else value
        return {**result, **self.extra}

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write ``config.json`` into ``folder`` (made if absent)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")

    # -- target ------------------------------------------------------------------------------------

    @classmethod
    def for_target(
        cls,
        target: Any,
        *,
        mask_token_id: int,
        target_layer_ids: Sequence[int] | None = None,
        num_layers: int = 5,
        num_draft_tokens: int = 7,
        summary_slots: int = 16,
        window: int = 256,
        markov_rank: int = 256,
        intermediate_size: int | None = None,
        **more: Any,
    ) -> LongSparkConfig:
        """A config whose shapes fit ``target`` (a Hugging Face config, as an object or a dict).

        ``target_layer_ids`` defaults to ``num_layers`` evenly spaced layers, the last one included;
        ``intermediate_size`` to the target's. ``more`` are further fields of this class.

        Raises ConfigError when the target cannot have a LongSpark drafter or a size is out of
        range.
        """
        shape, reasons = TargetShape.read(target)
        if shape is None or reasons:
            raise ConfigError("this target cannot have a LongSpark drafter", reasons)
        if target_layer_ids is not None:
            layer_ids = tuple(target_layer_ids)
        else:
            try:
                layer_ids = layer_ids_of_policy("uniform_n", shape.num_hidden_layers, num_layers)
            except ValueError as error:
                raise ConfigError(
                    "no drafter config for this target",
                    [str(error).replace("'uniform_n'", f"'uniform_{num_layers}'")],
                ) from error
        values: dict[str, Any] = dict(
            architectures=("DraftFreeKVModel",),
            dtype="bfloat16",
            draft_mode="parallel_shifted_qwen",
            global16_raw256_enabled=True,
            block_size=num_draft_tokens,
            local_draft_rows=num_draft_tokens,
            max_accepted_tokens=num_draft_tokens + 1,
            mask_token_id=mask_token_id,
            target_layer_ids=layer_ids,
            num_target_layers=shape.num_hidden_layers,
            parallel_mixer_layers=len(layer_ids),
            hidden_size=shape.hidden_size,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            qwen_num_attention_heads=shape.num_attention_heads,
            qwen_rope_theta=shape.rope_theta,
            qwen_intermediate_size=intermediate_size or shape.intermediate_size,
            parallel_markov_rank=markov_rank,
            global_memory_slots=summary_slots,
            raw_target_rows=window,
        )
        return cls(**{**values, **more})

    def validate_target(self, target: Any) -> list[str]:
        """Reasons why this drafter cannot serve ``target``; none when it can.

        ``target`` is a Hugging Face config, as an object or a dict. Each reason names the key on
        both sides and what to do.
        """
        shape, reasons = TargetShape.read(target)
        if shape is None:
            return reasons
        use_its_drafter = "use a drafter trained for this target"
        pairs = (
            ("hidden_size", self.hidden_size, "hidden_size", shape.hidden_size),
            (
                "qwen_num_attention_heads",
                self.num_attention_heads,
                "num_attention_heads",
                shape.num_attention_heads,
            ),
            (
                "num_key_value_heads",
                self.num_key_value_heads,
                "num_key_value_heads",
                shape.num_key_value_heads,
            ),
            ("head_dim", self.head_dim, "head_dim", shape.head_dim),
            ("vocab_size", self.vocab_size, "vocab_size", shape.vocab_size),
        )
        for ours, mine, theirs, wanted in pairs:
            if mine != wanted:
                reasons.append(
                    f"{ours} {mine} differs from the target's {theirs} {wanted}: {use_its_drafter}"
                )
        layers = shape.num_hidden_layers
        if self.num_target_layers not in (None, layers):
            reasons.append(
                f"num_target_layers {self.num_target_layers} differs from the target's "
                f"num_hidden_layers {layers}: {use_its_drafter}"
            )
        out_of_range = [i for i in self.tapped_layers if i >= layers]
        if out_of_range:
            reasons.append(
                f"target_layer_ids {out_of_range} are out of range, the target has layers "
                f"0..{layers - 1}: {use_its_drafter}"
            )
        for i in self.tapped_layers:
            if i < len(shape.layer_types) and shape.layer_types[i] != "full_attention":
                reasons.append(
                    f"tapped target layer {i} has {shape.layer_types[i]!r}: its cache lacks "
                    "rows that the summary covers; tap full-attention layers"
                )
        if shape.rope_theta and not math.isclose(
            self.qwen_rope_theta, shape.rope_theta, rel_tol=1e-9
        ):
            reasons.append(
                f"qwen_rope_theta {self.qwen_rope_theta} differs from the target's rope_theta "
                f"{shape.rope_theta}: the drafter reads the target's rotated keys, so "
                f"{use_its_drafter}; to stretch the context keep the base and give the target "
                'rope_scaling {"rope_type": "dynamic", "alpha": ...} or YaRN'
            )
        return reasons


def _is_ignored_key(key: Any) -> bool:
    return isinstance(key, str) and (key in _BOOKKEEPING_KEYS or key.startswith("xpress_"))


def _as_json(value: Any) -> str:
    return json.dumps(value)
