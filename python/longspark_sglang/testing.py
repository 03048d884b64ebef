"""Comparisons for tests of kernels and models in reduced precision."""

from __future__ import annotations

import torch


def assert_close_to_fp32(
    out: torch.Tensor,
    reference32: torch.Tensor,
    reference16: torch.Tensor,
    factor: float = 2.0,
    atol: float = 1e-5,
) -> None:
    """``out`` may be as far from exact as plain PyTorch in the same dtype is, times ``factor``.

    A fixed tolerance is too loose for short sums and too tight for long ones; the error of the
    plain computation on the very same inputs adapts to the problem.

    Args:
        out: what is tested, any floating dtype.
        reference32: the same mathematics in float32 (or float64) on the same inputs, same shape.
        reference16: the same mathematics in plain PyTorch in ``out``'s dtype, same shape.
        factor: how many times the plain error is allowed.
        atol: allowance where the plain computation happens to be exact.
    Raises:
        AssertionError: with the largest error, its place and the allowance.
    """
    shapes = [tuple(x.shape) for x in (out, reference32, reference16)]
    assert len(set(shapes)) == 1, f"shapes differ: {shapes}"
    if out.numel() == 0:
        return
    exact = reference32.double()
    error = (out.double() - exact).abs()
    # NaN compares false with everything, so it has to be asked for.
    assert not error.isnan().any(), "NaN (or infinity) where the other side has another value"
    allowed = factor * (reference16.double() - exact).abs().max().item() + atol
    worst = error.max().item()
    if worst > allowed:
        place = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        raise AssertionError(
            f"error {worst:.3g} at {place} exceeds {allowed:.3g} = {factor} x the error of plain "
            f"PyTorch + {atol:g} (found {out[tuple(place)].item():.6g}, "
            f"exact {exact[tuple(place)].item():.6g})"
        )
