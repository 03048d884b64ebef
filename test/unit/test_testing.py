"""assert_close_to_fp32 must be able to fail."""

from __future__ import annotations

import pytest
import torch
from longspark_sglang.testing import assert_close_to_fp32

EXACT = torch.linspace(-1, 1, 24).view(4, 6)
PLAIN = EXACT.bfloat16()


def test_plain_rounding_passes() -> None:
    assert_close_to_fp32(PLAIN, EXACT, PLAIN)
    assert_close_to_fp32(torch.empty(0), torch.empty(0), torch.empty(0))


@pytest.mark.parametrize("fault", ["one element", "nan", "shape"])
def test_faults_are_found(fault: str) -> None:
    out = EXACT.clone()
    if fault == "one element":
        out[2, 3] += 0.05
    elif fault == "nan":
        out[0, 0] = torch.nan
    else:
        out = out[:3]
    with pytest.raises(AssertionError) as caught:
        assert_close_to_fp32(out, EXACT, PLAIN)
    words = {"one element": "at [2, 3]", "nan": "NaN", "shape": "shapes differ"}
    assert words[fault] in str(caught.value)
