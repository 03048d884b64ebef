"""Running the compiled CPU operators with every instruction set that this machine has."""

import contextlib

import pytest
import torch
from longspark_sglang.ops import dispatch


def isas():
    """Names, plainest first; empty where the extension wasn't built."""
    if not dispatch.is_compiled("block_attention", "cpu"):
        return []
    return torch.ops.longspark.cpu_isas()


@contextlib.contextmanager
def using(isa):
    before = torch.ops.longspark.cpu_isa()
    torch.ops.longspark.cpu_isa(isa)
    try:
        yield
    finally:
        torch.ops.longspark.cpu_isa(before)


each_isa = pytest.mark.parametrize("isa", isas())
