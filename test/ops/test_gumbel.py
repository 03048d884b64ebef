import os
import subprocess
import sys
from importlib.util import find_spec

import op_oracle
import pytest
import torch
from longspark_sglang.ops import gumbel_noise
from longspark_sglang.ops.gumbel import hash_bits


def test_hash_is_murmur3():
    seeds = torch.tensor([0, 1, -1, 2**40 + 17, -(2**63)])
    positions = torch.tensor([0, 5, 2**31 + 3, 131071, 2**32 - 1])
    ids = torch.tensor([0, 1, 50, 151935])
    bits = hash_bits(seeds, positions, ids)
    for b in range(5):
        for i, token in enumerate(ids.tolist()):
            assert bits[b, i] == op_oracle.murmur(int(seeds[b]), int(positions[b]), token)


def test_noise_is_gumbel():
    noise = gumbel_noise(torch.tensor([7]), torch.tensor([3]), torch.arange(200_000))[0]
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, rel=0.02)


def test_noise_is_finite_at_both_ends_of_the_hash(monkeypatch):
    from longspark_sglang.ops import gumbel

    ends = torch.tensor([[0, 0xFFFFFFFF]])
    monkeypatch.setattr(gumbel, "hash_bits", lambda *arguments: ends)
    low, high = gumbel.gumbel_noise(torch.zeros(1), torch.zeros(1), torch.zeros(2))[0].tolist()
    assert low == pytest.approx(-709.78, abs=0.01) and high == pytest.approx(22.18, abs=0.01)


# Runs apart: Triton decides at import whether its kernels are interpreted, which is how SGLang's
# own hash kernel can be executed where no GPU is. What its sampler makes of the hash is compared in
# test/unit/test_acceptance_seeds.py.
SGLANG_HASH = """
import torch
from sglang.kernels.ops.sampling import murmur_hash
from longspark_sglang.ops.gumbel import hash_bits

g = torch.Generator().manual_seed(1)
batch, vocab = 8, 3000
seeds = torch.randint(-(2**62), 2**62, (batch,), generator=g)
positions = torch.randint(0, 2**20, (batch,), generator=g)
ids = torch.arange(vocab)
theirs = torch.empty(batch, vocab, dtype=torch.uint32)
murmur_hash.murmur_hash32_kernel[batch, -(-vocab // 1024)](
    seeds.to(torch.uint64), positions, ids, theirs, batch, vocab, BLOCK_SIZE=1024
)
assert torch.equal(theirs.to(torch.int64), hash_bits(seeds, positions, ids)), "hash"
print("same bits")
"""


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs sglang")
def test_hash_is_that_of_sglangs_seeded_sampler():
    done = subprocess.run(
        [sys.executable, "-c", SGLANG_HASH],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().endswith("same bits"), done.stderr[-2000:]
