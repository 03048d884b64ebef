"""The OpenAI-compatible API, through the openai package, beside the same server unspeculated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.server import Server, ServerPool
from serving.test_identity import CHECKED, CHUNKED

MODEL = "default"
PLAIN_REQUEST = {"custom_params": {"longspark": {"enabled": False}}}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "rename the variable total_count in this function"},
]
PROMPTS = [f"def function_{i}(total_count, index):\n    return " for i in range(8)]


@pytest.fixture
def plain(servers: ServerPool, tiny_target: Path) -> Server:
    return servers.get(tiny_target, extra_args=CHUNKED)


@pytest.fixture
def server(servers: ServerPool, tiny_target: Path, tiny_drafter: Path) -> Server:
    return servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)


def chat(server: Server, **parameters: Any) -> Any:
    defaults: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    return server.openai.chat.completions.create(**{**defaults, "max_tokens": 48, **parameters})


def complete(server: Server, **parameters: Any) -> Any:
    defaults: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[0], "temperature": 0}
    return server.openai.completions.create(**{**defaults, "max_tokens": 48, **parameters})


def usage(reply: Any) -> tuple[int, int]:
    """(prompt tokens, completion tokens), after a look at their sum."""
    counts = reply.usage
    assert counts.total_tokens == counts.prompt_tokens + counts.completion_tokens
    return counts.prompt_tokens, counts.completion_tokens


def test_chat_with_and_without_streaming(plain: Server, server: Server) -> None:
    wanted, reply = chat(plain), chat(server)
    text = reply.choices[0].message.content
    assert text and text == wanted.choices[0].message.content
    assert reply.choices[0].finish_reason == wanted.choices[0].finish_reason
    assert usage(reply) == usage(wanted)
    chunks = [*chat(server, stream=True, stream_options={"include_usage": True})]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text
    assert sum(bool(piece) for piece in pieces) > 3, "it came in one piece"
    assert usage(chunks[-1]) == usage(wanted)


def test_completions_with_and_without_streaming(plain: Server, server: Server) -> None:
    wanted, reply = complete(plain), complete(server)
    assert reply.choices[0].text == wanted.choices[0].text != ""
    assert usage(reply) == usage(wanted)
    chunks = [*complete(server, stream=True, stream_options={"include_usage": True})]
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == reply.choices[0].text
    assert usage(chunks[-1]) == usage(wanted)


def test_several_choices(plain: Server, server: Server) -> None:
    wanted = complete(plain)
    greedy = complete(server, n=3)
    assert [choice.text for choice in greedy.choices] == [wanted.choices[0].text] * 3
    prompt_tokens, completion_tokens = usage(wanted)
    assert usage(greedy) == (prompt_tokens, 3 * completion_tokens)
    drawn = chat(server, n=4, temperature=1.5)
    assert [choice.index for choice in drawn.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in drawn.choices}) > 1
    several = complete(server, prompt=PROMPTS[:3])
    singles = [complete(plain, prompt=prompt).choices[0].text for prompt in PROMPTS[:3]]
    assert [choice.text for choice in several.choices] == singles


def test_stop_strings_cut_where_they_cut_without_speculation(plain: Server, server: Server) -> None:
    """At every place of the answer, so that the stop falls on every slot of a block."""
    text = complete(plain).choices[0].text
    cut = 0
    for start in range(4, min(len(text) - 2, 44), 3):
        stop = text[start : start + 2]
        wanted = complete(plain, stop=stop)
        reply = complete(server, stop=stop)
        assert reply.choices[0].text == wanted.choices[0].text == text[: text.index(stop)]
        assert reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].matched_stop == stop
        assert usage(reply) == usage(wanted)
        cut += usage(reply)[1] < 48
    assert cut > 5


def test_logprobs_are_those_of_plain_decoding(plain: Server, server: Server) -> None:
    wanted, reply = (complete(s, logprobs=3).choices[0].logprobs for s in (plain, server))
    assert reply.tokens == wanted.tokens
    assert len(reply.tokens) == len(reply.token_logprobs) == 48
    assert reply.token_logprobs == pytest.approx(wanted.token_logprobs, abs=1e-4)
    for ours, theirs in zip(reply.top_logprobs, wanted.top_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    wanted, reply = (
        chat(s, logprobs=True, top_logprobs=2).choices[0].logprobs.content for s in (plain, server)
    )
    assert [entry.token for entry in reply] == [entry.token for entry in wanted]
    assert [entry.logprob for entry in reply] == pytest.approx(
        [entry.logprob for entry in wanted], abs=1e-4
    )


def test_speculation_can_be_switched_off_for_one_request(plain: Server, server: Server) -> None:
    """In the same batch, every other request decodes plainly and its neighbours speculate."""
    messages = [[{"role": "user", "content": text}] for text in PROMPTS]
    wanted = [chat(plain, messages=m).choices[0].message.content for m in messages]

    def ask(i: int) -> Any:
        off = PLAIN_REQUEST if i % 2 else {}
        return chat(server, messages=messages[i], extra_body={**off, "return_meta_info": True})

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        replies = list(clients.map(ask, range(len(PROMPTS))))
    assert [reply.choices[0].message.content for reply in replies] == wanted
    for i, reply in enumerate(replies):
        meta = reply.choices[0].meta_info
        if i % 2:
            assert meta["spec_num_correct_drafts"] == 0
            assert meta["spec_verify_ct"] == meta["completion_tokens"] - 1
        else:
            assert meta["spec_accept_length"] > 1.5
    text = complete(server, extra_body=PLAIN_REQUEST).choices[0].text
    assert text == complete(plain).choices[0].text


def test_a_misspelt_switch_is_a_bad_request(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="custom_params") as refusal:
        chat(server, extra_body={"custom_params": {"longspark": {"enable": False}}})
    assert '{"enabled": false}' in str(refusal.value)
    assert chat(server).choices[0].message.content
