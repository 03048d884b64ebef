"""A bounded soak: many clients on a K/V pool that is much too small, every answer compared.

    python benchmark/soak.py --minutes 30            # tiny pair on the CPU, made on first use
    python benchmark/soak.py --minutes 5 --target T --draft D

It starts a server with LONGSPARK_CHECK=1 and asks for answers of mixed lengths, prefixes, sampling
settings and grammars; it aborts some, hangs up on others, lets SGLang retract, and flushes. Each
greedy answer, also the part of one that was cut off, must equal plain decoding by the same server,
asked before. At every flush all K/V rows and all states must be back. Exit status 1 and the list
of what failed: a mismatch, a leak, a request that hangs, or a figure outside its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))

from pairs import PairCache
from serving.server import Server, ServerError

# Of the tiny pair's tokenizer; ids below are special.
FIRST, LAST = 4, 2000
CLIENTS, RUNNING, POOL = 64, 24, 8_000
REQUEST_TIMEOUT = 180.0
BLOCK = 8  # most tokens that one round adds
SERVER: dict[str, Any] = {
    "extra_args": (
        *("--chunked-prefill-size", "512", "--max-running-requests", str(RUNNING)),
        *("--schedule-conservativeness", "0.1"),
    ),
    "env": {
        "LONGSPARK_CHECK": "1",
        # SGLang expects short answers and lets in more than fits, so it has to take rows back; and
        # it takes them back every so many steps even where they fit.
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "64",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "29",
    },
    "max_total_tokens": POOL,
}
GRAMMARS: tuple[dict[str, str], ...] = (
    {"regex": "(ab|cd){2,6}[0-9]{1,3}"},
    {"regex": "[a-f]{3,40}x"},
    {"json_schema": json.dumps({"enum": ["red", "green", "blue"]})},
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_p": 1e-4},
)
GREEDY: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2},
    {"min_new_tokens": 12},
)


@dataclass(frozen=True)
class Case:
    """A greedy request and the answer of plain decoding."""

    ids: tuple[int, ...]
    sampling: dict[str, Any]
    answer: tuple[int, ...] = ()


@dataclass
class Report:
    """What happened; `failures` decides the exit status."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The report as lines for a person."""
        rows = {**dict(sorted(self.counts.items())), **self.figures}
        lines = [f"{name:32} {value}" for name, value in rows.items()]
        return "\n".join([*lines, *(f"FAILED: {failure}" for failure in self.failures[:20])])


def make_cases(count: int, seed: int) -> list[Case]:
    """Requests that share long prefixes, branch anywhere, or share nothing."""
    draw = random.Random(seed)

    def words(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST, LAST) for _ in range(length))

    documents = [words(1600), words(700), words(90)]
    cases = []
    for i in range(count):
        kind = draw.random()
        if kind < 0.5:
            document = draw.choice(documents)
            ids = (*document[: draw.randrange(1, len(document))], *words(draw.randrange(1, 20)))
        elif kind < 0.7:
            ids = draw.choice(documents)
        else:
            ids = words(draw.randrange(1, 150))
        sampling = {**draw.choice(GREEDY), "max_new_tokens": draw.choice((1, 3, 20, 60, 200))}
        if i % 8 == 7:
            sampling = {**draw.choice(GRAMMARS), "max_new_tokens": 60}
        else:
            sampling["ignore_eos"] = "min_new_tokens" not in sampling
            sampling["max_new_tokens"] = max(
                sampling["max_new_tokens"], sampling.get("min_new_tokens", 0)
            )
        cases.append(Case(ids, sampling))
    return cases


class Soak:
    """One run against a server that is up; `run` returns the report."""

    def __init__(self, server: Server, clients: int, seed: int = 0) -> None:
        self.server = server
        self.clients = clients
        self.seed = seed
        self.pool = server.server_info()["max_total_num_tokens"]
        self.report = Report()
        self.cases: list[Case] = []
        self._lock = threading.Lock()
        # Closed while the server is flushed; a client holds a share of it while it asks.
        self._gate = threading.Condition()
        self._flushing = False
        self._asking = 0
        self._finished: list[tuple[float, int, int]] = []  # time, tokens, rounds
        self._memory: list[tuple[float, int]] = []

    # -- the run ------------------------------------------------------------------------------

    def run(
        self, seconds: float, *, flush_every: float = 20.0, cases: int = 96, bounds: Bounds
    ) -> Report:
        """Reference answers, then `seconds` of load, then the last look."""
        log("asking for the answers of plain decoding")
        with ThreadPoolExecutor(16) as threads:
            self.cases = list(threads.map(self._with_answer, make_cases(cases, self.seed)))
        start_counts = self._pools_after_flush()
        before = self._state()
        begin = time.monotonic()
        end = begin + seconds
        with ThreadPoolExecutor(self.clients + 1) as threads:
            watcher = threads.submit(self._watch, end)
            running = [threads.submit(self._client, i, end) for i in range(self.clients)]
            while time.monotonic() < end and not self.report.failures:
                time.sleep(min(flush_every, max(0.0, end - time.monotonic())))
                self._flush_and_count(start_counts)
            for future in [*running, watcher]:
                future.result(timeout=2 * REQUEST_TIMEOUT)
        self._flush_and_count(start_counts)
        self._figures(before, begin, seconds, bounds)
        return self.report

    def _with_answer(self, case: Case) -> Case:
        off = {"custom_params": {"longspark": {"enabled": False}}}
        reply = self.server.generate(case.ids, timeout=600, **case.sampling, **off)
        return Case(case.ids, case.sampling, tuple(reply["output_ids"]))

    # -- clients ------------------------------------------------------------------------------

    def _client(self, number: int, end: float) -> None:
        draw = random.Random(1000 * self.seed + number)
        kinds: list[tuple[Callable[[random.Random, str], None], int]] = [
            (self._greedy, 10),
            (self._sampled, 3),
            (self._several, 1),
            (self._aborted, 2),
            (self._hung_up, 2),
        ]
        turn = 0
        while time.monotonic() < end and not self.report.failures:
            turn += 1
            (act,) = draw.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
            with self._gate:
                while self._flushing:
                    self._gate.wait()
                self._asking += 1
            try:
                act(draw, f"soak-{number}-{turn}")
                self._count("requests")
            except Exception as error:
                self._fail(f"{act.__name__.strip('_')}: {type(error).__name__}: {error}"[:1500])
            finally:
                with self._gate:
                    self._asking -= 1
                    self._gate.notify_all()

    def _greedy(self, draw: random.Random, rid: str) -> None:
        case = draw.choice(self.cases)
        more = {"return_logprob": True} if draw.random() < 0.1 else {}
        reply = self._ask(case.ids, **case.sampling, **more)
        self._compare(case, reply["output_ids"], whole=True)
        if "json_schema" in case.sampling or "regex" in case.sampling:
            self._count("grammars")
        if more:
            given = len(reply["meta_info"]["output_token_logprobs"])
            if given != len(reply["output_ids"]):
                self._fail(f"{given} log-probabilities for {len(reply['output_ids'])} tokens")

    def _sampled(self, draw: random.Random, rid: str) -> None:
        case, sampling = draw.choice(self.cases), dict(draw.choice(SAMPLING))
        tokens = draw.choice((5, 40, 150))
        if draw.random() < 0.3:
            grammar = draw.choice(GRAMMARS)
            reply = self._ask(case.ids, **sampling, **grammar, max_new_tokens=60)
            self._count("grammars")
            ended = reply["meta_info"]["finish_reason"]["type"] == "stop"
            if ended and "regex" in grammar and not re.fullmatch(grammar["regex"], reply["text"]):
                self._fail(f"{reply['text']!r} does not match {grammar['regex']}")
            return
        reply = self._ask(case.ids, **sampling, max_new_tokens=tokens, ignore_eos=True)
        self._count("sampled")
        if len(reply["output_ids"]) != tokens or not all(
            0 <= t < 2048 for t in reply["output_ids"]
        ):
            self._fail(f"{tokens} sampled tokens asked for: {reply['output_ids']}")

    def _several(self, draw: random.Random, rid: str) -> None:
        case = draw.choice(self.cases)
        for reply in self._ask(case.ids, **case.sampling, n=3):
            self._compare(case, reply["output_ids"], whole=True)

    def _aborted(self, draw: random.Random, rid: str) -> None:
        case = draw.choice(self.cases)
        threading.Timer(draw.random() * 2, self._abort, [rid]).start()
        try:
            reply = self._ask(case.ids, **case.sampling, rid=rid)
        except ServerError as error:
            if "abort" not in str(error).lower():
                raise
            self._count("aborts")  # it had no row yet
            return
        aborted = reply["meta_info"]["finish_reason"]["type"] == "abort"
        self._count("aborts" if aborted else "aborts too late")
        ids = reply["output_ids"]
        if aborted and 0 < len(ids) - len(case.answer) < BLOCK:
            # The abort met the round that ended the answer, and SGLang cuts an aborted one nowhere.
            ids = ids[: len(case.answer)]
        self._compare(case, ids, whole=not aborted)

    def _abort(self, rid: str) -> None:
        with contextlib.suppress(
            httpx.HTTPError, ServerError
        ):  # the server's end is seen elsewhere
            self.server.abort(rid)

    def _hung_up(self, draw: random.Random, rid: str) -> None:
        case = draw.choice(self.cases)
        patience = draw.randrange(1, 60)
        stream = self.server.stream(case.ids, **case.sampling)
        received: list[int] = []
        for chunk in stream:
            received = chunk["output_ids"]
            if len(received) >= patience:
                break
        stream.close()  # ends the connection
        self._count("disconnects")
        self._compare(case, received, whole=False)

    def _ask(self, ids: Sequence[int], **parameters: Any) -> Any:
        reply = self.server.generate(ids, timeout=REQUEST_TIMEOUT, **parameters)
        now = time.monotonic()
        for one in reply if isinstance(reply, list) else [reply]:
            meta = one["meta_info"]
            with self._lock:
                self.report.counts["retractions"] += meta.get("num_retractions", 0)
                self.report.counts["tokens"] += meta["completion_tokens"]
                self._finished.append(
                    (now, meta["completion_tokens"], meta.get("spec_verify_ct", 0))
                )
        return reply

    def _compare(self, case: Case, ids: Sequence[int], whole: bool) -> None:
        self._count("compared")
        expected = case.answer if whole else case.answer[: len(ids)]
        if tuple(ids) != expected:
            at = next(
                (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b),
                min(len(ids), len(expected)),
            )
            self._fail(
                f"mismatch at token {at} of {len(ids)} ({len(case.ids)} prompt tokens, "
                f"{case.sampling}): {list(ids[at : at + 5])} for {list(expected[at : at + 5])}"
            )

    # -- flushes, memory, figures -----------------------------------------------------------------

    def _flush_and_count(self, expected: dict[str, int]) -> None:
        """Let the clients finish, flush, and see that everything is back."""
        # Once under load first: SGLang must refuse, and nothing may happen.
        with contextlib.suppress(ServerError, httpx.HTTPError):
            self.server.post("/flush_cache")
            self._count("flushes between requests")
        with self._gate:
            self._flushing = True
            deadline = time.monotonic() + 2 * REQUEST_TIMEOUT
            while self._asking and time.monotonic() < deadline:
                self._gate.wait(1.0)
        try:
            if self._asking:
                self._fail(f"{self._asking} requests hang")
            else:
                found = self._pools_after_flush()
                self._count("flushes")
                log(f"{dict(self.report.counts)}")
                if found != expected:
                    self._fail(f"leak: {found} after a flush, {expected} at the start")
        except (ServerError, httpx.HTTPError) as error:
            self._fail(f"flush: {error}"[:1500])
        finally:
            with self._gate:
                self._flushing = False
                self._gate.notify_all()

    def _pools_after_flush(self) -> dict[str, int]:
        """Free rows; waits a little, for a request whose client left is still being cleaned up."""
        for _ in range(20):
            self.server.flush(timeout=60)
            state = self._state()
            found = {n: state[n] for n in ("free_kv_tokens", "free_request_rows", "owned_rows")}
            if found["owned_rows"] == 0 and found["free_kv_tokens"] == self.pool:
                break
            time.sleep(0.25)
        return found

    def _watch(self, end: float) -> None:
        """Memory of the server's processes, once a second."""
        while time.monotonic() < end and not self.report.failures:
            self._memory.append((time.monotonic(), server_memory(self.server)))
            time.sleep(1)

    def _figures(
        self, before: dict[str, Any], begin: float, seconds: float, bounds: Bounds
    ) -> None:
        if self.report.failures:
            return  # it ended before its time, perhaps with the server
        after, figures = self._state(), self.report.figures
        figures["seconds"] = round(seconds, 1)
        for name in ("proposals", "summary_rebuilds", "snapshot_hits", "snapshot_evictions"):
            figures[name] = after[name] - before[name]
        figures["states recomputed"] = after["state_checks"] - before["state_checks"]
        figures["largest state difference"] = float(f"{after['largest_state_difference']:.2g}")
        tenth = seconds / 10

        def during(part: int) -> tuple[float, float]:
            """Tokens a second and accept length of the requests that ended in a tenth."""
            low = begin + part * tenth
            ended = [(n, r) for at, n, r in self._finished if low <= at < low + tenth]
            tokens, rounds = sum(n for n, _ in ended), sum(r for _, r in ended)
            return tokens / tenth, tokens / rounds if rounds else 0.0

        def memory(part: int) -> float:
            low = begin + part * tenth
            return statistics.median(m for at, m in self._memory if low <= at < low + tenth)

        for name, place in (("tokens a second", 0), ("accept length", 1)):
            second, last = during(1)[place], during(9)[place]
            figures[f"{name}, 2nd and last tenth"] = f"{second:.2f} {last:.2f}"
            bounds.check(self._fail, name, second, last)
        second, last = memory(1), memory(9)
        figures["RSS MiB, 2nd and last tenth"] = f"{second / 2**20:.0f} {last / 2**20:.0f}"
        bounds.check(self._fail, "RSS", second, last)

    def _state(self) -> dict[str, Any]:
        return self.server.server_info()["internal_states"][0]["longspark"]

    def _count(self, name: str) -> None:
        with self._lock:
            self.report.counts[name] += 1

    def _fail(self, what: str) -> None:
        with self._lock:
            self.report.failures.append(what)


@dataclass(frozen=True)
class Bounds:
    """How far the last tenth may be from the second; None: printed only.

    Throughput and accept length of a short run on a shared machine say nothing.
    """

    throughput: float | None = 0.03
    accept_length: float | None = 0.03
    memory: float | None = 0.02

    def check(self, fail: Callable[[str], None], name: str, second: float, last: float) -> None:
        """Growth is what matters for memory, a fall for the others."""
        bound = {"RSS": self.memory, "accept length": self.accept_length}.get(name, self.throughput)
        change = last / second - 1 if second else 0.0
        if bound is not None and (change if name == "RSS" else -change) > bound:
            fail(f"{name}: {second:.4g} in the 2nd tenth, {last:.4g} in the last ({change:+.1%})")


def log(line: str) -> None:
    """A line on stderr: a long run shows that it goes on."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def server_memory(server: Server) -> int:
    """Resident bytes of all processes of a server."""
    assert server._process is not None
    launcher = psutil.Process(server._process.pid)
    total = 0
    for process in (launcher, *launcher.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--pool", type=int, default=POOL, help="rows of the K/V pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, help="default: the tiny pair of the tests")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/longspark/pairs")
    parser.add_argument("--speed-bound", type=float, default=0.03, help="0: not looked at")
    parser.add_argument("--memory-bound", type=float, default=0.02, help="0: not looked at")
    args = parser.parse_args()
    pairs = PairCache(args.cache)
    target = args.target or pairs.target()
    draft = args.draft or pairs.drafter(target)
    speed = args.speed_bound or None
    setting = {**SERVER, "max_total_tokens": args.pool}
    with Server(target, draft, start_timeout=900, **setting) as server:
        report = Soak(server, args.clients, args.seed).run(
            args.minutes * 60, bounds=Bounds(speed, speed, args.memory_bound or None)
        )
        if not server.alive:
            report.failures.append(f"the server ended\n{server.log_tail()}")
    print(report.text())
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
