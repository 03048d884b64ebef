"""SGLang's own DFLASH, DSPARK and EAGLE3 on the CPU platform: our yardsticks must be right.

The drafts are accepted for real (`baseline_drafts`), so a fault in a cache slot, a position or a
committed length changes the output; a draft that is always rejected would hide it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from baseline_drafts import MAKERS, SERVER_ARGS
from pairs import PairCache

from serving.hf_reference import Reference, assert_follows, prompts, samples
from serving.server import Server, ServerPool

TOKENS = 48
CHUNKED = ("--chunked-prefill-size", "512")
PAGE_SIZE = {"DFLASH": 16, "DSPARK": 1, "EAGLE3": 1}


@pytest.fixture(scope="module")
def reference(tiny_target: Path) -> Reference:
    return Reference(tiny_target)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, tiny_target: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {name: make(root / name, tiny_target) for name, make in MAKERS.items()}


@pytest.fixture(scope="module", params=MAKERS)  # of a module: pytest sorts the tests by server
def server(request, servers: ServerPool, tiny_target: Path, drafts: dict[str, Path]) -> Server:
    name = request.param
    extra = (*SERVER_ARGS[name], *CHUNKED)
    return servers.get(tiny_target, drafts[name], name, extra_args=extra, page_size=PAGE_SIZE[name])


def test_greedy_equals_no_speculation(server, reference):
    asked = prompts((1, 5, 40, 255, 257, 1100))
    expected = [reference.greedy(prompt, TOKENS) for prompt in asked]
    options = {"max_new_tokens": TOKENS, "ignore_eos": True}
    answers = [server.generate(prompt, **options) for prompt in asked]
    assert [answer["output_ids"] for answer in answers] == expected
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert TOKENS * len(asked) / rounds > 2.5  # accept length
    together = server.generate_many(asked * 3, concurrency=18, **options)
    assert [answer["output_ids"] for answer in together] == expected * 3


def test_samples_follow_the_law(server, reference):
    prompt = prompts((30,), seed=2)[0]
    sampling = {"temperature": 1.5, "top_k": 3}
    law = reference.law(prompt, 3, **sampling)
    drawn = samples(server, prompt, 1500, 3, **sampling)
    assert_follows(drawn, law)


@pytest.mark.parametrize("name", ["DFLASH", "DSPARK"])
def test_bfloat16_drafts_run(tmp_path, pair_cache: PairCache, tiny_target, name):
    """A bfloat16 block draft takes another path in SGLang than a float32 one."""
    import torch

    draft = MAKERS[name](tmp_path / name, tiny_target, dtype=torch.bfloat16)
    with Server(tiny_target, draft, name, dtype="bfloat16", extra_args=CHUNKED) as server:
        answers = server.generate_many(prompts((5, 40, 700)), max_new_tokens=32, ignore_eos=True)
        rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        assert 32 * len(answers) / rounds > 2
