"""What a drafter must know of its target, read from the target's Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def is_int(value: Any) -> bool:
    """An integer; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """A finite number."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True)
class TargetShape:
    """Sizes and rope of a target, read from its Hugging Face config in old or new notation."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    rope_theta: float
    rope_type: str  # "default", "linear", "dynamic" (fixed alpha), "yarn" or "llama3"
    rope_parameters: Mapping[str, Any]  # factor, alpha, original_max_position_embeddings, ...
    max_position_embeddings: int | None

    @classmethod
    def read(cls, target: Any) -> tuple[TargetShape | None, list[str]]:
        """(shape, reasons against it); the shape is None when the config lacks a size."""
        get = _reader(target)
        reasons = []
        sizes: dict[str, int] = {}
        for name in ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers"):
            value = get(name)
            if is_int(value) and value > 0:
                sizes[name] = value
            else:
                reasons.append(f"the target's config has no usable {name} ({value!r})")
        if reasons:
            return None, reasons
        heads = sizes["num_attention_heads"]
        kv_heads = get("num_key_value_heads") or heads
        head_dim = get("head_dim") or sizes["hidden_size"] // heads
        layer_types = get("layer_types")

        # transformers 5 has all of it in rope_parameters; before, rope_theta and rope_scaling.
        rope = dict(get("rope_scaling") or {})
        rope.update(get("rope_parameters") or {})
        # A target with one rope per layer type: only full-attention layers can be tapped.
        rope = dict(rope.get("full_attention") or rope)
        theta = rope.get("rope_theta") or get("rope_theta") or 0.0
        rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
        reasons += _rope_reasons(rope, theta, rope_type, get("partial_rotary_factor"))

        if get("kv_lora_rank"):
            reasons.append(
                "the target uses latent attention (kv_lora_rank): its cache holds no K/V rows"
            )
        for name, neutral in (
            ("final_logit_softcapping", None),
            ("logit_scale", 1),
            ("logits_scaling", 1),
            ("embedding_multiplier", 1),
            ("scale_emb", 1),
        ):
            value = get(name)
            if value is not None and value != neutral:
                reasons.append(
                    f"the target has {name} {value}: the drafter uses its embedding and head "
                    "unscaled"
                )
        shape = cls(
            hidden_size=sizes["hidden_size"],
            intermediate_size=get("intermediate_size") or 4 * sizes["hidden_size"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=sizes["vocab_size"],
            num_hidden_layers=sizes["num_hidden_layers"],
            layer_types=tuple(layer_types) if layer_types else (),
            rope_theta=float(theta) if is_real(theta) else 0.0,
            rope_type=rope_type,
            rope_parameters=rope,
            max_position_embeddings=get("max_position_embeddings"),
        )
        return shape, reasons


def _rope_reasons(
    rope: Mapping[str, Any], theta: Any, rope_type: str, partial_factor: Any
) -> list[str]:
    """Reasons why the drafter cannot rotate its block rows as the target rotates its keys."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return [
            "the target has one rope per layer type (nested rope_parameters) and none for "
            "'full_attention', the only type that can be tapped"
        ]
    reasons = []
    if not is_real(theta) or theta <= 0:
        reasons.append(
            "the target's config names no rope_theta: add it (in rope_parameters, or at top level)"
        )
    needed = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("alpha",),
        "yarn": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }
    if rope_type not in needed:
        reasons.append(
            f"the target's rope_type {rope_type!r} is not supported: use one of {', '.join(needed)}"
        )
    elif rope_type == "dynamic" and "alpha" not in rope:
        reasons.append(
            "the target's rope_type 'dynamic' without alpha changes its base with the length, when "
            "keys are cached already: give a fixed alpha, or use 'yarn'"
        )
    else:
        missing = [key for key in needed[rope_type] if not is_real(rope.get(key))]
        if missing:
            reasons.append(
                f"the target's rope_type {rope_type!r} needs the number(s) {', '.join(missing)}"
            )
    if rope.get("mrope_section"):
        reasons.append(
            "the target uses multi-axis rope (mrope_section): only text targets are supported"
        )
    partial = rope.get("partial_rotary_factor", partial_factor)
    if partial not in (None, 1, 1.0):
        reasons.append(
            f"the target rotates {partial} of each head: the drafter rotates the whole head"
        )
    return reasons


def _reader(target: Any) -> Callable[[str], Any]:
    """A ``get(name)`` over a dict or object; of a multimodal config the text part counts."""

    def get_from(config: Any, name: str) -> Any:
        if isinstance(config, Mapping):
            return config.get(name)
        return getattr(config, name, None)

    text = get_from(target, "text_config")
    config = target if text is None else text
    return lambda name: get_from(config, name)
