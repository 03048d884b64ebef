"""The host emulation of the CUDA kernels, built on first use: torch.ops.longspark_emu.*"""

import functools
import importlib.util
import os
from pathlib import Path

import torch
from longspark_sglang.ops import fakes

BUILD = Path(__file__).resolve().parents[2] / "csrc/host_emulation/build.py"
SANITIZED = os.environ.get("LONGSPARK_SANITIZE") == "1"  # as `make sanitize` runs the tests
ORDERS = ("forward", "reversed", "random")


@functools.cache
def _builder():
    spec = importlib.util.spec_from_file_location("longspark_emulation_build", BUILD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_possible():
    """Whether there is a compiler to build the emulation with."""
    return _builder().compiler() is not None


@functools.cache
def operators():
    """Build (if out of date) and load the emulation; returns torch.ops.longspark_emu."""
    torch.ops.load_library(str(_builder().build(SANITIZED)))
    fakes.register("longspark_emu")
    return torch.ops.longspark_emu


def set_order(seed, order="random"):
    """How fibers and blocks are ordered from now on."""
    operators().configure(seed, order)
