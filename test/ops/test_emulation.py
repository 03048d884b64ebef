"""The emulation itself: it runs sound kernels and catches each planted fault."""

import subprocess
import sys
from pathlib import Path

import emulation
import pytest
import torch

pytestmark = pytest.mark.skipif(not emulation.is_possible(), reason="needs a C++ compiler")

FAULTS = {
    "missing_syncthreads": "race: another thread|never stored to",
    "missing_syncwarp": "race: another thread|never stored to",
    "missing_second_barrier": "race: another thread",
    "divergent_barrier": "divergent barrier: (a thread has left|this thread leaves)",
    "two_barriers_as_one": "divergent barrier: other threads of the block wait at line",
    "divergent_shuffle": "divergent (collective: a lane has left|barrier: the block can't go on)",
    "partial_mask": "__shfl_xor_sync must name all 32 lanes",
    "load_past_the_end": "out-of-bounds load of 4 bytes: at byte 256 of in, which has 256",
    "store_past_the_end": "out-of-bounds store of 4 bytes: at byte (512|768) of out, which has 512",
    "store_to_an_input": "store to in, which is an input",
    "misaligned_vector": "misaligned access: an address that is no multiple of 16 bytes",
    "unwritten_shared": "load of shared memory that was never stored to",
    "past_the_shared_memory": "access outside the shared memory",
    "two_blocks_store_one_element": r"race: another block stored to this .*\(out\)",
    "one_block_reads_from_another": r"race: another block (loaded|stored to) this .*\(out\)",
    "in_place_without_a_barrier": r"race: another thread .* (loaded|stored to) this .*\(out\)",
}


def values():
    return torch.arange(64, dtype=torch.float32)


def sound_result():
    return values().roll(-1).repeat(2)  # of both blocks


@pytest.fixture(params=emulation.ORDERS)
def order(request):
    emulation.set_order(7, request.param)
    yield request.param
    emulation.set_order(1)


def test_a_sound_kernel_runs_in_every_order(order):
    out = emulation.operators().planted("sound", values())
    assert torch.equal(out, sound_result())


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught_in_every_order(order, fault):
    with pytest.raises(RuntimeError, match=FAULTS[fault]):
        emulation.operators().planted(fault, values())
    # A caught fault leaves nothing behind.
    assert torch.equal(emulation.operators().planted("sound", values()), sound_result())


@pytest.mark.parametrize("seed", range(5))
def test_a_fault_is_caught_whatever_the_seed(seed):
    emulation.set_order(seed)
    with pytest.raises(RuntimeError, match=FAULTS["missing_syncthreads"]):
        emulation.operators().planted("missing_syncthreads", values())


def test_an_error_names_source_line_block_and_thread():
    with pytest.raises(RuntimeError, match=r"planted\.cpp:\d+, block \(\d, 0, 0\), thread 63"):
        emulation.operators().planted("load_past_the_end", values())


def test_shared_memory_starts_as_nan_in_every_block():
    assert emulation.operators().planted("poison", values()).isnan().all()


def test_unknown_order_is_refused():
    with pytest.raises(RuntimeError, match="order must be forward, reversed or random, not sorted"):
        emulation.operators().configure(1, "sorted")


if emulation.SANITIZED:

    def test_the_sanitizer_sees_into_kernels():
        code = (
            "import emulation, torch;"
            "emulation.operators().planted('past_a_local_array', torch.zeros(64))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode != 0
        assert "out of bounds" in done.stderr or "stack-buffer-overflow" in done.stderr
