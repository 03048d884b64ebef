"""SGLang's own bench_serving as the client: its requests, its clocks, its arithmetic.

It is called in this process with the command line that a person would type (which is recorded), and
its output file is read. Nothing of it is reimplemented; the only thing added is a look at the
requests' own times, which bench_serving keeps and does not print.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspark_sglang.bench.options import BenchError


@dataclass(frozen=True)
class Request:
    """One request as bench_serving timed it; seconds, `start` on a clock of this run."""

    start: float
    first_token: float
    end: float
    token_times: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def tpot(self) -> float | None:
        """Milliseconds per token after the first, (last - first) / (n - 1), None below two.

        Of tokens whose arrival was seen: bench_serving overlooks what shows no text yet.
        """
        if len(self.token_times) < 2:
            return None
        return (self.end - self.first_token) / (len(self.token_times) - 1) * 1e3


@dataclass(frozen=True)
class ServingResult:
    """A run of bench_serving.

    Attributes:
        command: its arguments.
        figures: its result line (throughputs, medians), without per-request details.
        requests: every request.
    """

    command: list[str]
    figures: dict[str, Any]
    requests: list[Request]

    @property
    def tpots(self) -> list[float]:
        """Milliseconds per token of each request that has at least two."""
        return [request.tpot for request in self.requests if request.tpot is not None]


def run_bench_serving(
    url: str,
    prompts: Sequence[str],
    output_tokens: int,
    *,
    concurrency: int,
    temperature: float = 0.0,
    seed: int = 1,
    ignore_eos: bool = True,
    warm: bool = True,
) -> ServingResult:
    """Send prompts with bench_serving.

    Args:
        url: of the server.
        prompts: texts, sent as they are.
        output_tokens: of every request (at least 4, bench_serving's limit).
        concurrency: requests at a time.
        warm: let bench_serving send the first prompt once beforehand, so that a single prompt's
            prefill is not measured; it does not flush the prefix cache.
    Raises:
        BenchError: a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="longspark-bench-") as folder:
        data, output = Path(folder) / "prompts.jsonl", Path(folder) / "result.jsonl"
        with data.open("w", encoding="utf-8") as file:
            for prompt in prompts:
                turns = [{"content": prompt}, {"content": "-"}]
                file.write(json.dumps({"conversations": turns}) + "\n")
        command = [
            *("--backend", "sglang", "--base-url", url, "--dataset-name", "custom"),
            *("--dataset-path", str(data), "--num-prompts", str(len(prompts))),
            *("--sharegpt-output-len", str(output_tokens)),
            *("--max-concurrency", str(concurrency), "--temperature", str(temperature)),
            *("--seed", str(seed), "--warmup-requests", "1" if warm else "0"),
            *("--output-file", str(output), "--output-details", "--disable-tqdm"),
        ]
        if not ignore_eos:
            command.append("--disable-ignore-eos")
        with _captured_requests() as captured:
            _call(command)
        figures = json.loads(output.read_text().splitlines()[-1])
    failed = [error for error in figures["errors"] if error]
    if failed or len(captured) != len(prompts):
        reason = failed[0].strip().splitlines()[-1] if failed else "a request is missing"
        raise BenchError(f"bench_serving: {len(failed)} of {len(prompts)} failed: {reason}")
    kept = {key: value for key, value in figures.items() if not isinstance(value, (list, dict))}
    shown = ["prompts.jsonl" if part == str(data) else part for part in command]
    return ServingResult(shown, kept, [_request(output) for output in captured])


def _call(command: list[str]) -> None:
    from sglang.benchmark import serving

    argv = sys.argv
    sys.argv = ["sglang.benchmark.serving", *command]
    try:
        # Its tables would drown ours.
        with tempfile.TemporaryFile("w+") as printed, contextlib.redirect_stdout(printed):
            try:
                serving.cli_main()
            except SystemExit as error:
                printed.seek(0)
                tail = printed.read().splitlines()[-3:]
                raise BenchError(f"bench_serving ended: {error}: {' '.join(tail)}") from error
    finally:
        sys.argv = argv


@contextlib.contextmanager
def _captured_requests() -> Iterator[list[Any]]:
    """The request records that bench_serving computes its figures from."""
    from sglang.benchmark import serving

    captured: list[Any] = []
    original = serving.calculate_metrics

    def calculate(*args: Any, **kwargs: Any) -> Any:
        captured.extend(kwargs["outputs"] if "outputs" in kwargs else args[1])
        return original(*args, **kwargs)

    serving.calculate_metrics = calculate
    try:
        yield captured
    finally:
        serving.calculate_metrics = original


def _request(output: Any) -> Request:
    first = output.start_time + output.ttft
    times, now = [first], first
    for gap in output.itl:
        now += gap
        times.append(now)
    return Request(
        start=output.start_time,
        first_token=first,
        end=times[-1],
        token_times=tuple(times),
        prompt_tokens=output.prompt_len,
        output_tokens=output.output_len,
    )


@dataclass(frozen=True)
class Window:
    """What happened within a steady stretch of a run.

    Attributes:
        seconds: its length.
        throughput: output tokens per second.
        tpot: milliseconds: decoding request-seconds over tokens after the first.
    """

    seconds: float
    throughput: float
    tpot: float


def steady_window(requests: Sequence[Request], skip: float, length: float) -> Window:
    """Figures of the stretch that starts `skip` seconds after the first request.

    BenchError where the run ended before the stretch does.
    """
    begin = min(request.start for request in requests) + skip
    end = begin + length
    last = max(request.end for request in requests)
    if last < end:
        raise BenchError(
            f"the run lasted {last - begin + skip:.0f} s, the window ends after "
            f"{skip + length:.0f} s; send more prompts"
        )
    tokens = sum(begin <= t < end for request in requests for t in request.token_times)
    later = sum(begin <= t < end for request in requests for t in request.token_times[1:])
    decoding = sum(
        max(0.0, min(end, request.end) - max(begin, request.first_token)) for request in requests
    )
    return Window(length, tokens / length, decoding / max(later, 1) * 1e3)
