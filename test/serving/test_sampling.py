"""Sampling parameters through the real server: what plain decoding answers, token for token.

The plain server runs without overlap: with overlap SGLang's penalizers lag one token behind and
count the prompt's last token, which is not what its documentation says. Without overlap it applies
its penalizers in the order of a set of classes, another one in each process, so repetition together
with frequency or presence penalties can't be compared with it; those are compared with the same
request decoded plainly by our server, and with SGLang's penalizers in the unit tests.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from serving.server import Server, ServerError, ServerPool
from serving.workload import FIRST, LAST

PLAIN = {"extra_args": ("--disable-overlap-schedule",)}
OFF = {"longspark": {"enabled": False}}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)

    def prompt() -> list[int]:
        return [draw.randrange(FIRST, LAST) for _ in range(draw.randrange(2, 40))]

    return [prompt() for _ in range(count)]


@pytest.fixture
def plain(servers: ServerPool, tiny_target: Path) -> Server:
    return servers.get(tiny_target, **PLAIN)


@pytest.fixture
def server(servers: ServerPool, tiny_target: Path, tiny_drafter: Path) -> Server:
    return servers.get(tiny_target, tiny_drafter)


@pytest.fixture(scope="session")
def tokenizer(tiny_target: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_target)


def ask_all(server: Server, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    """Answers of many different requests at once, in order."""
    answers: list[Any] = [None] * len(requests)

    def ask(i: int) -> None:
        prompt, parameters = requests[i]
        answers[i] = server.generate(prompt, **parameters)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert all(answer is not None for answer in answers)
    return answers


def accepted(answers: list[Any]) -> int:
    return sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)


# -- user case 7 -----------------------------------------------------------------------------------

PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": 1.8},
    "both": {"frequency_penalty": -0.4, "presence_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {"100": 8.0, "101": -5.0}, "presence_penalty": 2.0},
}
COMBINED: list[dict[str, Any]] = [
    {"frequency_penalty": -0.5, "repetition_penalty": 0.9},
    {"frequency_penalty": 0.3, "presence_penalty": 0.4, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def penalised(servers: ServerPool, tiny_target: Path) -> tuple[list[Any], list[Any]]:
    """Every setting on several prompts, and min_new_tokens with stop tokens that come early.

    Returns:
        the requests and plain decoding's answers.
    """
    plain = servers.get(tiny_target, **PLAIN)
    requests = [
        (prompt, {"max_new_tokens": 80, **setting})
        for prompt in prompts(4, seed=1)
        for setting in PENALTIES.values()
    ]
    for prompt in prompts(4, seed=2):
        text = plain.generate(prompt, max_new_tokens=40)["output_ids"]
        stops = {"stop_token_ids": [text[5], text[12]], "min_new_tokens": 19}
        requests.append((prompt, {"max_new_tokens": 60, **stops}))
        requests.append((prompt, {"max_new_tokens": 60, "presence_penalty": 0.8, **stops}))
    return requests, ask_all(plain, requests)


def test_penalties_and_minimum_equal_plain_decoding(
    penalised: tuple[list[Any], list[Any]], server: Server
) -> None:
    requests, expected = penalised
    # The first requests are the settings in turn, for one prompt after the other.
    texts = [answer["output_ids"] for answer in expected]
    for i, name in enumerate(PENALTIES):
        mine = texts[i : 4 * len(PENALTIES) : len(PENALTIES)]
        unpenalised = texts[0 : 4 * len(PENALTIES) : len(PENALTIES)]
        assert (mine != unpenalised) == (name != "none"), f"{name} changes no text here"
    answers = ask_all(server, requests)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer["meta_info"]["finish_reason"] == wanted["meta_info"]["finish_reason"]
    assert accepted(answers) > 500


def test_combined_penalties_equal_one_token_at_a_time(server: Server) -> None:
    jobs = [
        (prompt, {"max_new_tokens": 80, **setting})
        for prompt in prompts(4, seed=1)
        for setting in COMBINED
    ]
    plainly = [(prompt, {**parameters, "custom_params": OFF}) for prompt, parameters in jobs]
    answers, expected = ask_all(server, jobs), ask_all(server, plainly)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    assert accepted(answers) > 100 and accepted(expected) == 0


# -- user case 5 -----------------------------------------------------------------------------------


def same_ending(answer: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Ids, text, log-probabilities and counts all end where plain decoding ends them."""
    assert answer["output_ids"] == wanted["output_ids"]
    assert answer["text"] == wanted["text"]
    got, want = answer["meta_info"], wanted["meta_info"]
    assert got["finish_reason"] == want["finish_reason"]
    assert got["completion_tokens"] == want["completion_tokens"] == len(answer["output_ids"])
    got_logprobs, want_logprobs = got["output_token_logprobs"], want["output_token_logprobs"]
    assert [entry[1] for entry in got_logprobs] == answer["output_ids"]
    assert len(got_logprobs) == len(want_logprobs)
    for (value, *_), (expected, *_) in zip(got_logprobs, want_logprobs, strict=True):
        assert math.isclose(value, expected, abs_tol=1e-4)


def test_stop_strings_over_two_tokens_and_stop_tokens_at_every_offset(
    plain: Server, server: Server, tokenizer: Any
) -> None:
    prompt = prompts(1, seed=3)[0]
    whole = plain.generate(prompt, max_new_tokens=40)["output_ids"]
    requests = []
    for end in range(1, 34):
        head, longer = tokenizer.decode(whole[:end]), tokenizer.decode(whole[: end + 1])
        added = len(longer) - len(head)
        if added > 0 and longer.startswith(head):
            # The shortest string over the seam that does not occur before it.
            for tail in range(1, len(head) + 1):
                stop = longer[len(head) - tail : len(head) + 1]
                if longer.find(stop) == len(head) - tail:
                    requests.append({"stop": [stop]})
                    break
        if whole.index(whole[end]) == end:
            requests.append({"stop_token_ids": [whole[end]]})
    assert sum("stop" in request for request in requests) > 16
    common = {"max_new_tokens": 40, "return_logprob": True}
    jobs = [(prompt, {**common, **request}) for request in requests]
    for answer, wanted in zip(ask_all(server, jobs), ask_all(plain, jobs), strict=True):
        same_ending(answer, wanted)


def test_streamed_and_openai_answers_end_at_the_stop_string_too(
    plain: Server, server: Server, tokenizer: Any
) -> None:
    prompt = tokenizer.decode(prompts(1, seed=4)[0])
    whole = plain.generate(prompt, max_new_tokens=30)["text"]
    stop = whole[len(whole) // 2 :][:3]
    texts, counts = [], []
    for each in (plain, server):
        reply = each.openai.completions.create(
            model="any", prompt=prompt, max_tokens=30, temperature=0, stop=[stop], logprobs=1
        )
        texts.append(reply.choices[0].text)
        counts.append(reply.usage.completion_tokens)
        assert len(reply.choices[0].logprobs.tokens) == reply.usage.completion_tokens
        chunks = list(each.stream(prompt, max_new_tokens=30, stop=[stop]))
        texts.append(chunks[-1]["text"])
        counts.append(chunks[-1]["meta_info"]["completion_tokens"])
    assert set(texts) == {whole[: whole.index(stop)]}
    assert len(set(counts)) == 1


# -- user case 6 -----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["red", "green", "blue"]},
        "c": {"type": "boolean"},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
EBNF = 'root ::= "<" word ("," word){1,3} ">"\nword ::= [a-f]{2,5}'


def literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return re.sub(r"([^\w ])", r"\\\1", text)


def constrained(plain: Server, tokenizer: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """Schemas and grammars, and literals that end at each token of a text the drafter knows."""
    requests: list[tuple[list[int], dict[str, Any]]] = []
    for prompt in prompts(3, seed=5):
        requests.append((prompt, {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 120}))
        requests.append((prompt, {"ebnf": EBNF, "max_new_tokens": 60}))
        requests.append((prompt, {"regex": r"[a-z]{3} [0-9]{2,4}!", "max_new_tokens": 40}))
    known = prompts(12, seed=6)
    for prompt, answer in zip(
        known, ask_all(plain, [(p, {"max_new_tokens": 16}) for p in known]), strict=True
    ):
        for end in range(1, 16):
            text = tokenizer.decode(answer["output_ids"][:end])
            if text.isascii() and text.isprintable():
                requests.append((prompt, {"regex": literal(text), "max_new_tokens": 40}))
    assert len(requests) > 40
    return requests


def test_grammars_equal_plain_decoding_wherever_they_end(
    plain: Server, server: Server, tokenizer: Any
) -> None:
    requests = constrained(plain, tokenizer)
    expected = ask_all(plain, requests)
    for turn in range(2):  # again: no state of an earlier request may be left
        answers = ask_all(server, requests)
        for i, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
            assert answer["output_ids"] == wanted["output_ids"], (turn, requests[i][1])
            assert answer["text"] == wanted["text"]
            assert answer["meta_info"]["finish_reason"] == wanted["meta_info"]["finish_reason"]
    for (_, parameters), answer in zip(requests, expected, strict=True):
        if "regex" in parameters:
            assert re.fullmatch(parameters["regex"], answer["text"])
    assert accepted(answers) > 100


def test_sampled_json_is_valid(server: Server) -> None:
    """At temperature 1 nothing but the grammar keeps the answer in shape."""
    jobs = [
        (prompt, {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 200, "temperature": 1.0})
        for prompt in prompts(24, seed=7)
    ]
    finished = 0
    for answer in ask_all(server, jobs):
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            value = json.loads(answer["text"])
            assert set(value) == {"a", "b", "c"} and value["b"] in ("red", "green", "blue")
            finished += 1
    assert finished > 5


def test_aborted_constrained_requests_leave_the_others_alone(
    plain: Server, server: Server, tokenizer: Any
) -> None:
    requests = constrained(plain, tokenizer)
    expected = [answer["output_ids"] for answer in ask_all(plain, requests)]

    def doomed(i: int) -> None:
        server.generate(
            requests[i][0], rid=f"doomed-{i}", regex="[a-z ]{300,400}", max_new_tokens=400
        )

    callers = [threading.Thread(target=doomed, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    aborter = threading.Timer(0.3, lambda: [server.abort(f"doomed-{i}") for i in range(8)])
    aborter.start()
    answers = ask_all(server, requests)
    for thread in (*callers, aborter):
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert [answer["output_ids"] for answer in answers] == expected
    assert server.alive


# -- user case 8 and logprobs ----------------------------------------------------------------------


@pytest.mark.parametrize("only", [{"top_p": 1e-4}, {"top_k": 1}, {"min_p": 0.99}])
def test_a_setting_that_leaves_one_token_is_reproducible(server: Server, only: dict) -> None:
    prompt = prompts(1, seed=8)[0]
    greedy = server.generate(prompt, max_new_tokens=32)["output_ids"]
    jobs = [(prompt, {"temperature": 1.0, "max_new_tokens": 32, **only})] * 6
    assert [answer["output_ids"] for answer in ask_all(server, jobs)] == [greedy] * 6


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"frequency_penalty": 0.5, "logit_bias": {"70": 3.0}},
        # One choice, yet logprobs of a temperature; 0.7 alone could not be compared.
        {"temperature": 0.7, "top_p": 1e-4},
        {"temperature": 1.4, "top_p": 1e-4, "presence_penalty": 0.8},
    ],
)
def test_logprobs_equal_plain_decoding(
    plain: Server, server: Server, parameters: dict[str, Any]
) -> None:
    asked = {
        "max_new_tokens": 24,
        "return_logprob": True,
        "top_logprobs_num": 4,
        "token_ids_logprob": [7, 70, 700],
        **parameters,
    }
    jobs = [(prompt, asked) for prompt in prompts(6, seed=9)]
    for answer, wanted in zip(ask_all(server, jobs), ask_all(plain, jobs), strict=True):
        assert answer["output_ids"] == wanted["output_ids"]
        got, want = answer["meta_info"], wanted["meta_info"]
        for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            for here, there in zip(_entries(got[name]), _entries(want[name]), strict=True):
                assert here[1] == there[1]
                assert math.isclose(here[0], there[0], abs_tol=1e-4), name


def _entries(nested: Any) -> Iterator[tuple[float, int]]:
    """The (logprob, token) leaves of what SGLang returns."""
    for item in nested:
        if isinstance(item[0], (int, float)):
            yield item[0], item[1]
        else:
            yield from _entries(item)


def test_logprobs_of_sampled_tokens_are_the_targets(plain: Server, server: Server) -> None:
    """At temperature 1 they must equal what plain prefill assigns to the same text."""
    for prompt in prompts(6, seed=10):
        answer = server.generate(prompt, temperature=1.0, max_new_tokens=24, return_logprob=True)
        text = answer["output_ids"]
        scored = plain.generate(
            prompt + text, max_new_tokens=1, return_logprob=True, logprob_start_len=len(prompt) - 1
        )["meta_info"]["input_token_logprobs"]
        known = {i: entry for i, entry in enumerate(scored[-len(text) :])}
        for i, (value, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
            assert known[i][1] == token
            assert math.isclose(known[i][0], value, abs_tol=1e-4)


# -- the switch and refusals -----------------------------------------------------------------------


def test_a_switched_off_request_decodes_plainly_in_the_same_batch(server: Server) -> None:
    prompt = prompts(1, seed=12)[0]
    jobs = [
        (prompt, {"max_new_tokens": 40, "ignore_eos": True, "custom_params": choice})
        for choice in (OFF, {"longspark": {"enabled": True}}, None)
    ]
    off, on, unsaid = ask_all(server, jobs)
    assert off["output_ids"] == on["output_ids"] == unsaid["output_ids"]
    assert accepted([off]) == 0
    assert off["meta_info"]["spec_verify_ct"] == 39
    assert accepted([on]) > 10 and accepted([unsaid]) > 10


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"custom_params": {"longspark": {"on": True}}}, "custom_params"),
        ({"return_hidden_states": True}, "hidden states"),
    ],
)
def test_what_can_not_be_exact_is_refused_with_a_reason(
    server: Server, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(ServerError, match=named):
        server.generate([5, 6, 7], **asked)
    assert server.generate([5, 6, 7], max_new_tokens=2)["output_ids"]


# -- servers of their own --------------------------------------------------------------------------


RETRACTED: dict[str, Any] = {
    "extra_args": ("--enable-mixed-chunk", "--chunked-prefill-size", "64"),
    "env": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"},
}


def test_grammars_survive_retraction_and_mixed_chunks(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    """Prompts of eleven chunks arrive while constrained requests ride along, one token a chunk."""
    plain, server = (
        servers.get(tiny_target, **PLAIN),
        servers.get(tiny_target, tiny_drafter, **RETRACTED),
    )
    shape = "([a-f]{3} [0-9]{4}! ){12}"
    riders = [(prompt, {"regex": shape, "max_new_tokens": 200}) for prompt in prompts(6, seed=12)]
    draw = random.Random(13)
    loads = [
        ([draw.randrange(FIRST, LAST) for _ in range(700)], {"max_new_tokens": 4}) for _ in range(6)
    ]
    expected = [answer["output_ids"] for answer in ask_all(plain, riders + loads)]
    answers: list[Any] = []
    riding = threading.Thread(target=lambda: answers.extend(ask_all(server, riders)))
    riding.start()
    time.sleep(0.2)  # the riders are decoding by now
    answers_of_loads = ask_all(server, loads)
    riding.join(timeout=300)
    assert [a["output_ids"] for a in answers + answers_of_loads] == expected
    assert all(re.fullmatch(shape, answer["text"]) for answer in answers)
    # They did ride: no answer came before the loads were in.
    assert min(a["meta_info"]["e2e_latency"] for a in answers) > 0.2


def test_penalties_survive_retraction_and_mixed_chunks(
    penalised: tuple[list[Any], list[Any]],
    servers: ServerPool,
    tiny_target: Path,
    tiny_drafter: Path,
) -> None:
    """Plain decoding forgets them when a request is retracted; a request must not notice."""
    requests, answered = penalised
    expected = [answer["output_ids"] for answer in answered]
    server = servers.get(tiny_target, tiny_drafter, **RETRACTED)
    answers = ask_all(server, requests)
    assert [answer["output_ids"] for answer in answers] == expected
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) >= 3


def test_seeded_requests_equal_plain_decoding(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    """On a deterministic server a seed gives the same text with drafts and without.

    Requests with and without filters are asked apart: SGLang's sampler, which draws the first one,
    takes its noise by rank for a whole batch as soon as one request in it has a filter.
    """
    options = {"extra_args": ("--enable-deterministic-inference",)}
    kinds = [
        [{"temperature": 1.0}, {"temperature": 0.6}],
        [{"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.2, "top_k": 30}],
    ]
    groups = [
        [
            (prompt, {"max_new_tokens": 32, "ignore_eos": True, "sampling_seed": 5 + i, **kind})
            for i, prompt in enumerate(prompts(5, seed=11))
            for kind in group
        ]
        for group in kinds
    ]
    plain = servers.get(tiny_target, **options)
    expected = [
        [plain.generate(prompt, **parameters)["output_ids"] for prompt, parameters in jobs]
        for jobs in groups
    ]
    server = servers.get(tiny_target, tiny_drafter, **options)
    answers = [ask_all(server, jobs) for jobs in groups]
    assert [[a["output_ids"] for a in group] for group in answers] == expected
    assert all(accepted(group) > 40 for group in answers)
    with pytest.raises(ServerError, match="min_p"):
        server.generate([5, 6, 7], temperature=1.0, min_p=0.1)
