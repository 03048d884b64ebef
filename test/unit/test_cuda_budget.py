"""csrc/compile_cuda.py: reading the compiler's report and comparing it with the budget."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("compile_cuda", ROOT / "csrc/compile_cuda.py")
compile_cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compile_cuda)

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90a'
ptxas info    : Function properties for _Z5firstv
    56 bytes stack frame, 40 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 56 bytes cumulative stack size
ptxas info    : Compile time = 30.1 ms
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90a'
ptxas info    : Function properties for _Z6secondv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 640 bytes smem
"""
TABLE = {"kernel<bf16>": {"90a": {"registers": 100, "shared": 640, "spill": 0}}}


def changed(**used):
    table = copy.deepcopy(TABLE)
    table["kernel<bf16>"]["90a"].update(used)
    return table


def test_the_report_is_read():
    found = {e["symbol"]: (e["registers"], e["spill"]) for e in compile_cuda.ENTRY.finditer(REPORT)}
    assert found == {"_Z5firstv": ("255", "40"), "_Z6secondv": ("32", "0")}


def test_within_the_budget():
    assert compile_cuda.excesses(TABLE, TABLE, same_release=True) == []
    less = changed(registers=90, shared=0)
    assert compile_cuda.excesses(less, TABLE, same_release=True) == []


@pytest.mark.parametrize("what, used", [("registers", 101), ("shared", 641), ("spill", 8)])
def test_over_the_budget(what, used):
    problems = compile_cuda.excesses(changed(**{what: used}), TABLE, same_release=True)
    assert problems == [
        f"kernel<bf16> for sm_90a: {what} {used}, budget {TABLE['kernel<bf16>']['90a'][what]}"
    ]


def test_another_compiler_may_use_other_registers_but_not_spill_much():
    assert compile_cuda.excesses(changed(registers=130, spill=60), TABLE, same_release=False) == []
    problems = compile_cuda.excesses(changed(spill=65), TABLE, same_release=False)
    assert problems == ["kernel<bf16> for sm_90a: spill 65, budget 0"]


def test_kernels_and_budget_name_the_same():
    assert compile_cuda.excesses({}, TABLE, same_release=True) == [
        "kernel<bf16> is in the budget but not compiled any more"
    ]
    assert compile_cuda.excesses(TABLE, {}, same_release=True) == [
        "kernel<bf16> for sm_90a is not in the budget"
    ]


def test_the_stored_budget_covers_every_architecture():
    kernels = json.loads(compile_cuda.BUDGET.read_text())["kernels"]
    assert all(set(archs) == set(compile_cuda.ARCHS) for archs in kernels.values())
    families = {kernel.split("<")[0] for kernel in kernels}
    sources = "".join(path.read_text() for path in (ROOT / "csrc").glob("*.cu"))
    assert families and all(family in sources for family in families)
