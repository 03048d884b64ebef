"""Rotary position embedding, as the target's config has it.

The drafter reads the target's keys as cached, hence rotated; its own block rows must be rotated
with the very same frequencies. They are never stored in a checkpoint but rebuilt from the target's
config. Formulas follow transformers (operation by operation in float32, for equal bits):

* default: 1 / base^(2i/d)
* dynamic with a fixed ``alpha`` (NTK): base' = base * alpha^(d / (d - 2))
* linear: default / factor
* yarn (arXiv 2309.00071): low frequencies divided by factor, high ones kept, a ramp in between,
  and the cos/sin tables scaled
* llama3: the same idea with the ramp in wavelengths
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from longspark_sglang.config import ConfigError
from longspark_sglang.target import TargetShape


@dataclass(frozen=True)
class Rope:
    """Frequencies of one target.

    Attributes:
        inverse_frequencies: [d/2] float32, radians per position.
        attention_scaling: factor on cos and sin (1 except for YaRN).
    """

    inverse_frequencies: torch.Tensor
    attention_scaling: float = 1.0

    @classmethod
    def of_target(cls, target: Any) -> Rope:
        """From a Hugging Face config (object or dict); ConfigError when its rope is unsupported."""
        shape, reasons = TargetShape.read(target)
        if shape is None or reasons:
            raise ConfigError("this target's rope cannot be followed", reasons)
        return _BUILDERS[shape.rope_type](shape)

    @classmethod
    def of_hf_model(cls, hf_model: Any) -> Rope:
        """As `of_target`, and compared with what the transformers model itself computes.

        Not every model follows every key of its config: the fixed ``alpha``, for one, is read by
        SGLang for all models, by transformers for Hunyuan's only. ConfigError where they differ.
        """
        rope = cls.of_target(hf_model.config)
        rotary = getattr(hf_model.get_decoder(), "rotary_emb", None)
        prefix = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
        theirs = getattr(rotary, prefix + "inv_freq", None)
        scaling = getattr(rotary, prefix + "attention_scaling", None)
        if (
            theirs is None
            or theirs.shape != rope.inverse_frequencies.shape
            or not torch.allclose(theirs.cpu(), rope.inverse_frequencies, rtol=1e-5, atol=0)
            or not math.isclose(scaling or 0.0, rope.attention_scaling, rel_tol=1e-5)
        ):
            raise ConfigError(
                "this target's rope cannot be followed",
                [
                    f"{type(hf_model).__name__} does not rotate as its config says: use a "
                    "rope_type that transformers applies to this model"
                ],
            )
        return rope

    def tables(
        self, positions: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [..., d/2] in ``dtype``, of integer positions [...].

        Angles are float32 whatever the dtype, as in the target.
        """
        frequencies = self.inverse_frequencies.to(positions.device)
        angle = positions.float()[..., None] * frequencies
        if dtype == torch.float64:
            angle = angle.double()
        cos, sin = angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


def rope_tables(target: Any, positions: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [..., d/2] float32, of given positions or of 0..positions-1.

    ``target`` is a Hugging Face config, as an object or a dict; any ``attention_scaling`` is folded
    in. Raises ConfigError when its rope is unsupported.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions)
    return Rope.of_target(target).tables(positions)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half rope over the whole last dimension, in x's dtype.

    Args:
        x: [..., heads, d].
        cos, sin: [..., d/2], in x's dtype; one angle for all heads of a position.
    """
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _inverse_frequencies(base: float, dim: int) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))


def _default(shape: TargetShape) -> Rope:
    return Rope(_inverse_frequencies(shape.rope_theta, shape.head_dim))


def _fixed_ntk(shape: TargetShape) -> Rope:
    dim = shape.head_dim
    base = shape.rope_theta * shape.rope_parameters["alpha"] ** (dim / (dim - 2))
    return Rope(_inverse_frequencies(base, dim))


def _linear(shape: TargetShape) -> Rope:
    native = _inverse_frequencies(shape.rope_theta, shape.head_dim)
    return Rope(native / shape.rope_parameters["factor"])


def _yarn(shape: TargetShape) -> Rope:
    parameters, dim, base = shape.rope_parameters, shape.head_dim, shape.rope_theta
    factor = parameters["factor"]
    original = parameters.get("original_max_position_embeddings") or shape.max_position_embeddings
    if not original:
        raise ConfigError(
            "this target's rope cannot be followed",
            ["rope_type 'yarn' needs original_max_position_embeddings, or max_position_embeddings"],
        )

    def index_of_rotations(rotations: float) -> float:
        """The (real) frequency index that turns this often over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = index_of_rotations(parameters.get("beta_fast") or 32)
    high = index_of_rotations(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2).float() - low) / width).clamp(0, 1)
    kept = 1 - ramp
    stretched = base ** (torch.arange(0, dim, 2).float() / dim)
    frequencies = 1.0 / (factor * stretched) * (1 - kept) + 1.0 / stretched * kept
    return Rope(frequencies, _yarn_scaling(parameters, factor))


def _yarn_scaling(parameters: Any, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if above and below:
        return magnitude(above) / magnitude(below)
    return magnitude(1.0)


def _llama3(shape: TargetShape) -> Rope:
    parameters = shape.rope_parameters
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    native = _inverse_frequencies(shape.rope_theta, shape.head_dim)
    wavelength = 2 * math.pi / native
    share = (original / wavelength - low) / (high - low)
    between = (1 - share) * native / factor + share * native
    frequencies = torch.where(wavelength > original / low, native / factor, between)
    return Rope(torch.where(wavelength < original / high, native, frequencies))


_BUILDERS = {
    "default": _default,
    "dynamic": _fixed_ntk,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}
