"""Requests that no client should send: each gets an answer or a 4xx, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.server import Server, ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import free_counts

VOCABULARY = 2048
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def server(servers: ServerPool, tiny_target: Path, tiny_drafter: Path) -> Iterator[Server]:
    """The identity tests' server, which must be as it was afterwards."""
    server = servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)
    before, expected = free_counts(server), server.generate([5, 6, 7])["output_ids"]
    yield server
    assert server.generate([5, 6, 7])["output_ids"] == expected
    assert free_counts(server) == before


def send(server: Server, content: bytes | str) -> httpx.Response:
    """The raw response to a body; its status must be an answer or the client's own fault."""
    response = server._http.post(
        "/generate",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=TIMEOUT,
    )
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text[:2000]
    return response


def body(ids: Any = (5, 6, 7), **sampling: Any) -> str:
    sampling = {"temperature": 0, "max_new_tokens": 6, **sampling}
    return json.dumps({"input_ids": ids, "sampling_params": sampling})


BODIES: dict[str, bytes | str] = {
    "no body": b"",
    "not json": b"{",
    "invalid utf-8": b'{"text": "\xff\xfe", "sampling_params": {}}',
    "a list": b"[]",
    "a number": b"1",
    "deep": b'{"text": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    "no prompt": json.dumps({"sampling_params": {}}),
    "empty ids": body([]),
    "empty text": json.dumps({"text": "", "sampling_params": {"max_new_tokens": 4}}),
    "null text": json.dumps({"text": None}),
    "lone surrogate": '{"text": "\\ud800", "sampling_params": {"max_new_tokens": 4}}',
    "control characters": json.dumps({"text": "\0\1\2" * 50, "sampling_params": {}}),
    "huge": body([5] * 200_000),
    "huge text": json.dumps({"text": "a b " * 200_000}),
    "special ids": body([0, 1, 2, 3, 0, 1, 2, 3]),
    "last id": body([VOCABULARY - 1]),
    "id too large": body([VOCABULARY]),
    "id far too large": body([2**40]),
    "negative id": body([-1]),
    "ids of text": body(["5"]),
    "fractional id": body([5.5]),
    "no tokens asked for": body(max_new_tokens=0),
    "negative tokens": body(max_new_tokens=-1),
    "many tokens": body(max_new_tokens=10**9, stop_token_ids=list(range(VOCABULARY))),
    "temperature tiny": body(temperature=1e-30),
    "temperature large": body(temperature=1e30),
    "temperature negative": body(temperature=-1),
    "temperature NaN": body(temperature=float("nan")),
    "temperature infinite": body(temperature=float("inf")),
    "temperature of text": body(temperature="hot"),
    "top_p zero": body(temperature=1, top_p=0),
    "top_p tiny": body(temperature=1, top_p=1e-30),
    "top_p above one": body(temperature=1, top_p=1.5),
    "top_k zero": body(temperature=1, top_k=0),
    "top_k huge": body(temperature=1, top_k=2**31 - 1),
    "top_k beyond int32": body(temperature=1, top_k=2**40),
    "min_p one": body(temperature=1, min_p=1.0),
    "min_p above one": body(temperature=1, min_p=2.0),
    "penalties at their ends": body(frequency_penalty=2, presence_penalty=-2),
    "repetition at its end": body(repetition_penalty=2.0),
    "penalty too large": body(frequency_penalty=1e9),
    "bias": body(logit_bias={"7": -1e30, "8": 1e30}),
    "bias of no token": body(logit_bias={str(VOCABULARY): 5}),
    "bias of text": body(logit_bias={"seven": 1}),
    "bias NaN": body(logit_bias={"7": float("nan")}),
    "stop everything": body(stop=["", "a", " "]),
    "stop ids anywhere": body(stop_token_ids=[-1, VOCABULARY, 2**40]),
    "minimum above maximum": body(min_new_tokens=50),
    "n zero": body(n=0),
    "bad regex": body(regex="(["),
    "bad schema": body(json_schema="{"),
    "impossible schema": body(json_schema='{"enum": []}'),
    "two grammars": body(regex="a", ebnf='root ::= "b"'),
    "custom_params of text": body(custom_params="longspark"),
    "custom_params deep": body(custom_params={"longspark": {"enabled": {"enabled": True}}}),
    "unknown field": body(temprature=1),
    "logprobs from far away": json.dumps(
        {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 10**6}
    ),
    "many logprobs": json.dumps(
        {
            "input_ids": [5, 6],
            "return_logprob": True,
            "top_logprobs_num": VOCABULARY,
            "sampling_params": {"max_new_tokens": 3},
        }
    ),
}


def test_each_hostile_body_is_answered(server: Server) -> None:
    """One after the other; a bystander's answer stays what it was."""
    expected = server.generate([5, 6, 7], max_new_tokens=200, ignore_eos=True)["output_ids"]
    wrong = []
    with ThreadPoolExecutor(1) as threads:
        for name, content in BODIES.items():
            bystander = threads.submit(
                server.generate, [5, 6, 7], max_new_tokens=200, ignore_eos=True
            )
            try:
                send(server, content)
            except (AssertionError, httpx.HTTPError) as error:
                wrong.append(f"{name}: {error}"[:500])
            assert server.alive, f"{name} ended the server\n{server.log_tail()}"
            assert bystander.result(timeout=TIMEOUT)["output_ids"] == expected, name
    assert not wrong, "\n".join(wrong)


NUMBERS = st.sampled_from([0, 1, -1, 0.5, 1e-9, 1e9, 2**31, -(2**63), 1.0, 2.0, 20, 0.999])
SAMPLING = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(0, 12)},
    optional={
        "temperature": NUMBERS,
        "top_p": NUMBERS,
        "top_k": NUMBERS,
        "min_p": NUMBERS,
        "frequency_penalty": NUMBERS,
        "presence_penalty": NUMBERS,
        "repetition_penalty": NUMBERS,
        "min_new_tokens": st.integers(-1, 14),
        "stop": st.lists(st.text(max_size=3), max_size=2),
        "stop_token_ids": st.lists(st.integers(-2, VOCABULARY + 2), max_size=3),
        "ignore_eos": st.booleans(),
        "n": st.integers(0, 3),
        "custom_params": st.none()
        | st.dictionaries(st.just("longspark"), st.booleans() | st.none()),
        "logit_bias": st.dictionaries(st.integers(-1, VOCABULARY).map(str), NUMBERS, max_size=2),
    },
)
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), max_size=9) | st.text(max_size=20)


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(prompt=PROMPTS, sampling=SAMPLING)
def test_any_sampling_fields(server: Server, prompt: Any, sampling: dict[str, Any]) -> None:
    """An answer, with no more tokens than asked for, or a 4xx."""
    key = "text" if isinstance(prompt, str) else "input_ids"
    response = send(server, json.dumps({key: prompt, "sampling_params": sampling}))
    if response.status_code == 200:
        replies = response.json()
        for reply in replies if isinstance(replies, list) else [replies]:
            assert len(reply["output_ids"]) <= sampling["max_new_tokens"] + 1
            assert all(0 <= token < VOCABULARY for token in reply["output_ids"])
    assert server.alive, server.log_tail()
