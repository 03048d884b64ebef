"""What LONGSPARK refuses: every reason at once, before weights load; or one request, with a 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from longspark_sglang.check import parse_server_args
from longspark_sglang.config import LongSparkConfig
from longspark_sglang.serving import compat
from longspark_sglang.serving.algorithm import refusals, validate_server_args
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from transformers import AutoConfig

from serving.server import Server, ServerError, ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import state

HEADLINE = "LONGSPARK cannot serve this configuration:"
MISFIT = "this drafter does not fit this target:"

# Flags of launch_server, and what the refusal must say: the cause and the flag to change.
REFUSED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "pp": (("--pp-size", "2"), "pipeline parallelism", "--pp-size 1"),
    "fp8-kv": (("--kv-cache-dtype", "fp8_e5m2"), "fp8_e5m2", "--kv-cache-dtype auto"),
    "fp4-kv": (("--kv-cache-dtype", "nvfp4"), "nvfp4", "--kv-cache-dtype auto"),
    "topk": (("--speculative-eagle-topk", "2"), "a chain", "--speculative-eagle-topk 1"),
    "steps": (("--speculative-num-steps", "3"), "one step", "--speculative-num-steps"),
    "single": (
        ("--speculative-accept-threshold-single", "0.9"),
        "output distribution",
        "--speculative-accept-threshold-single 0.9",
    ),
    "acc": (
        ("--speculative-accept-threshold-acc", "0.9"),
        "output distribution",
        "--speculative-accept-threshold-acc 0.9",
    ),
    "quantised": (
        ("--speculative-draft-model-quantization", "fp8"),
        "quantised drafter",
        "--speculative-draft-model-quantization",
    ),
    "adaptive": (("--speculative-adaptive",), "fixed verify width", "--speculative-adaptive"),
    "unified": (("--enable-unified-memory",), "row ids", "--enable-unified-memory"),
    "tbo": (("--enable-two-batch-overlap",), "taps", "--enable-two-batch-overlap"),
    "pdmux": (("--enable-pdmux",), "PD multiplexing", "--enable-pdmux"),
    "lora": (("--enable-lora",), "LoRA", "--enable-lora"),
    "dp-attention": (
        ("--enable-dp-attention", "--tp-size", "2", "--dp-size", "2"),
        "DP attention",
        "--enable-dp-attention",
    ),
    "disaggregation": (
        ("--disaggregation-mode", "decode"),
        "disaggregation",
        "--disaggregation-mode",
    ),
    "cp": (("--attn-cp-size", "2", "--tp-size", "2"), "context parallelism", "size 1"),
    "hicache": (
        ("--enable-hierarchical-cache",),
        "HiCache",
        "--enable-hierarchical-cache",
    ),
    "device": (("--device", "xpu"), "device xpu", "cuda or cpu"),
    "width-9": (
        ("--speculative-num-draft-tokens", "9"),
        "--speculative-num-draft-tokens 9",
        "2 to 8",
    ),
    "width-1": (
        ("--speculative-num-draft-tokens", "1"),
        "--speculative-num-draft-tokens 1",
        "2 to 8",
    ),
    "rl": (("--rl-on-policy-target", "fsdp"), "log-probabilities", "--rl-on-policy-target"),
}


def parsed(target: Path, *flags: str | Path) -> Any:
    """The server arguments of these flags, as SGLang parses them."""
    command = ["--model-path", target, "--device", "cpu", "--speculative-algorithm", "LONGSPARK"]
    args, problem = parse_server_args([str(word) for word in (*command, *flags)])
    assert args is not None, problem
    return args


def test_the_plain_command_is_not_refused(tiny_target: Path, tiny_drafter: Path) -> None:
    args = parsed(tiny_target, "--speculative-draft-model-path", tiny_drafter)
    assert refusals(args) == []
    validate_server_args(args)


@pytest.mark.parametrize("case", REFUSED)
def test_a_flag_that_cannot_be_served(tiny_target: Path, tiny_drafter: Path, case: str) -> None:
    flags, cause, remedy = REFUSED[case]
    args = parsed(tiny_target, "--speculative-draft-model-path", tiny_drafter, *flags)
    (reason,) = refusals(args)
    assert cause in reason and remedy in reason


def test_all_reasons_come_at_once(tiny_target: Path, tiny_drafter: Path) -> None:
    flags = [word for words, _, _ in list(REFUSED.values())[:13] for word in words]
    args = parsed(tiny_target, "--speculative-draft-model-path", tiny_drafter, *flags)
    with pytest.raises(ValueError, match=HEADLINE) as refusal:
        validate_server_args(args)
    lines = str(refusal.value).splitlines()
    # The two KV cache types are one flag given twice.
    assert len(lines) == 1 + 12
    assert all(line.startswith("  - ") for line in lines[1:])


def test_a_drafter_that_is_not_there_or_not_named(tiny_target: Path, tmp_path: Path) -> None:
    (reason,) = refusals(parsed(tiny_target))
    assert "--speculative-draft-model-path" in reason
    missing = tmp_path / "no-such-folder"
    (reason,) = refusals(parsed(tiny_target, "--speculative-draft-model-path", missing))
    assert str(missing) in reason
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 0, "blok_size": 7}))
    args = parsed(tiny_target, "--speculative-draft-model-path", tmp_path, "--pp-size", "2")
    reasons = refusals(args)
    assert len(reasons) == 2 and "--pp-size" in reasons[0]
    assert "block_size" in reasons[1] and "did you mean 'block_size'?" in reasons[1]


def test_targets_that_do_not_fit(pair_cache, tiny_target: Path, tiny_drafter: Path) -> None:
    config = LongSparkConfig.from_json_file(tiny_drafter / "config.json")
    assert compat.target_refusals(AutoConfig.from_pretrained(tiny_target), config) == []
    other = {"hidden": 192, "heads": 3, "kv_heads": 1, "vocab": 1000, "layers": 4}
    reasons = compat.target_refusals(
        AutoConfig.from_pretrained(pair_cache.target(**other, rope_theta=5000.0)), config
    )
    for key in (
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"),
        *("num_hidden_layers", "target_layer_ids", "rope_theta"),
    ):
        assert sum(key in reason for reason in reasons) >= 1, (key, reasons)
    hybrid = pair_cache.target(sliding_window=64)
    tapping = LongSparkConfig.from_json_file(
        pair_cache.drafter(hybrid, layer_ids=[1, 2, 5]) / "config.json"
    )
    (reason,) = compat.target_refusals(AutoConfig.from_pretrained(hybrid), tapping)
    assert "2" in reason and "sliding_attention" in reason


# -- through the server ----------------------------------------------------------------------------


def log_of_a_start_that_fails(*arguments: Any, **keywords: Any) -> str:
    """What a server wrote that must end by itself while it starts."""
    server = Server(*arguments, **keywords)
    with pytest.raises(ServerError, match="the server ended while starting"):
        server.start()
    return server.log


def test_a_start_with_refused_flags_ends_with_one_list(
    tiny_target: Path, tiny_drafter: Path
) -> None:
    cases = ("fp8-kv", "single", "acc", "steps", "quantised", "width-9")
    flags = [word for case in cases for word in REFUSED[case][0]]
    log = log_of_a_start_that_fails(tiny_target, tiny_drafter, extra_args=flags)
    assert log.count(HEADLINE) == 1
    for case in cases:
        _, cause, remedy = REFUSED[case]
        assert any(cause in line and remedy in line for line in log.splitlines()), (case, log)
    assert "Load weight begin" not in log


def test_a_start_with_another_target_ends_with_one_list(pair_cache, tiny_drafter: Path) -> None:
    target = pair_cache.target(hidden=192, heads=3, kv_heads=1, vocab=1000)
    log = log_of_a_start_that_fails(target, tiny_drafter)
    assert log.count(MISFIT) == 1
    listed = log[log.index(MISFIT) :]
    for ours, theirs in (("hidden_size 256", 192), ("heads 4", 3), ("vocab_size 2048", 1000)):
        reason = next(line for line in listed.splitlines() if f"{ours} differs" in line)
        assert reason.endswith(f" {theirs}: use a drafter trained for this target")
    assert "Memory pool end" not in log


@pytest.fixture
def server(servers: ServerPool, tiny_target: Path, tiny_drafter: Path) -> Iterator[Server]:
    """The identity tests' server, which must be there afterwards."""
    server = servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)
    expected = server.generate([5, 6, 7])["output_ids"]
    refused = state(server)["refused_requests"]
    yield server
    assert server.generate([5, 6, 7])["output_ids"] == expected
    after = state(server)
    assert after["refused_requests"] > refused
    assert after["owned_rows"] == 0


@pytest.mark.parametrize(
    "switch", ["off", {"enabled": "no"}, {"enabled": 1}, {"enable": False}, [], {"x": {}}]
)
def test_a_malformed_switch_is_a_400(server: Server, switch: Any) -> None:
    with pytest.raises(ServerError, match=r"/generate: 400 .*LONGSPARK cannot serve") as refusal:
        server.generate([5, 6, 7], custom_params={"longspark": switch})
    assert r"must be {\"enabled\": true} or {\"enabled\": false}" in str(refusal.value)


def test_requests_that_cannot_be_exact_are_a_400(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    """Where the server itself allows them, and SGLang's own check does not answer before ours."""
    server = servers.get(
        tiny_target,
        tiny_drafter,
        extra_args=(*CHUNKED, "--enable-custom-logit-processor", "--enable-return-hidden-states"),
    )

    def ask(custom_params: dict[str, Any] | None = None, **fields: Any) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling, **fields}
        if custom_params is not None:
            sampling["custom_params"] = custom_params
        return server.post("/generate", body).json()["output_ids"]

    wanted = ask()
    processor = DisallowedTokensLogitsProcessor.to_str()
    forbidden = {"token_ids": [wanted[0]]}
    with pytest.raises(ServerError, match=r"/generate: 400 .*drop return_hidden_states"):
        ask(return_hidden_states=True)
    with pytest.raises(ServerError, match=r"/generate: 400 .*use logit_bias or a grammar"):
        ask(forbidden, custom_logit_processor=processor)
    # Decoded plainly it is served.
    plainly = ask({**forbidden, "longspark": {"enabled": False}}, custom_logit_processor=processor)
    assert len(plainly) == 32 and wanted[0] not in plainly
    assert ask() == wanted
