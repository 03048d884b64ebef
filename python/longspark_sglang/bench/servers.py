"""Real SGLang servers, one per method, and the proof that each ran what it was asked to run."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspark_sglang.bench.options import BenchError, longspark_arguments
from longspark_sglang.client import ServerClient

PLAIN = "plain"
# method -> option that names its draft, and what its format does not say itself
BASELINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "DSPARK": ("dspark_draft", ()),
    "DFLASH": ("dflash_draft", ()),
    "EAGLE3": (
        "eagle3_draft",
        (
            *("--speculative-num-steps", "7", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "8"),
        ),
    ),
}
START_TIMEOUT = 1800.0


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """Drafts of the methods to compare with; plain decoding needs none."""
    for method, (option, _) in BASELINES.items():
        parser.add_argument(f"--{option.replace('_', '-')}", help=f"draft in {method}'s format")
    parser.add_argument(
        "--alive", type=int, default=0,
        help="servers that may run at the same time (default: all on a CPU, one on a GPU)",
    )  # fmt: skip


def methods(options: argparse.Namespace) -> dict[str, list[str]]:
    """method -> the SGLang arguments that select it; plain decoding first."""
    found: dict[str, list[str]] = {PLAIN: []}
    if options.draft:
        found["LONGSPARK"] = longspark_arguments(options)
    for method, (option, extra) in BASELINES.items():
        draft = getattr(options, option)
        if draft:
            found[method] = [
                *("--speculative-algorithm", method, "--speculative-draft-model-path", draft),
                *extra,
            ]
    return found


@dataclass(frozen=True)
class Counters:
    """Totals since the server's start: requests finished, tokens emitted, verify rounds."""

    requests: int
    tokens: int
    rounds: int

    def since(self, before: Counters) -> Counters:
        """What was added after `before`."""
        return Counters(
            self.requests - before.requests,
            self.tokens - before.tokens,
            self.rounds - before.rounds,
        )

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify round, bonus included; a request's first token comes from prefill."""
        return (self.tokens - self.requests) / self.rounds if self.rounds else None


class RunningServer:
    """A server that can be asked.

    Args:
        method: name for messages and for the proof of what ran.
        url: http://host:port.
    """

    def __init__(self, method: str, url: str) -> None:
        self.method, self.url = method, url
        self.client = ServerClient(url, timeout=3600)

    def info(self) -> dict[str, Any]:
        """/server_info."""
        return self.client.get("/server_info")

    def counters(self) -> Counters:
        """Totals out of /metrics."""
        totals = prometheus_totals(self._get("/metrics"))
        return Counters(
            int(totals.get("sglang:num_requests_total", 0)),
            int(totals.get("sglang:generation_tokens_total", 0)),
            int(totals.get("sglang:spec_verify_calls_total", 0)),
        )

    def healthy(self) -> bool:
        """Whether /health answers."""
        try:
            self._get("/health")
        except OSError:
            return False
        return True

    def _get(self, path: str) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=60) as response:
            return response.read().decode()


class ServerProcess(RunningServer):
    """`python -m sglang.launch_server` on a free port of this machine.

    Args:
        method: as for RunningServer.
        arguments: SGLang's server arguments.
        variables: added to the environment.
    """

    def __init__(
        self, method: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        super().__init__(method, f"http://127.0.0.1:{port}")
        self.command = [sys.executable, "-m", "sglang.launch_server", *map(str, arguments)]
        self.command += ["--host", "127.0.0.1", "--port", str(port)]
        # An idle scheduler polls in a busy loop otherwise, and slows the one that is measured.
        self.command += ["--enable-metrics", "--sleep-on-idle"]
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile(prefix="longspark-bench-", suffix=".log")  # noqa: SIM115

    def start(self) -> ServerProcess:
        """Start it and wait until it is healthy.

        Raises BenchError with the end of its log if it is not, or if it runs another algorithm.
        """
        self._process = subprocess.Popen(
            self.command,
            env=os.environ | self._variables,
            stdin=subprocess.DEVNULL,
            stdout=self._log.fileno(),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_TIMEOUT
        try:
            while not self.healthy():
                if self._process.poll() is not None:
                    raise BenchError(f"the {self.method} server ended\n{self.log_tail()}")
                if time.monotonic() > deadline:
                    raise BenchError(f"the {self.method} server did not start\n{self.log_tail()}")
                time.sleep(0.5)
            confirm_algorithm(self.method, self.info())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and everything it started."""
        import psutil

        process, self._process = self._process, None
        if process is None:
            return
        family = []
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
        for child in family:  # ranks and the detokenizer outlive a parent that was killed
            if child.is_running():
                child.kill()
        psutil.wait_procs(family, timeout=10)
        self._log.close()

    @property
    def alive(self) -> bool:
        """Whether the launcher runs."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = 30) -> str:
        """The end of its log."""
        text = Path(self._log.name).read_text(errors="replace")
        return "\n".join([" ".join(self.command), *text.splitlines()[-lines:]])


class Fleet:
    """The servers of one run, started when they are first asked for.

    Args:
        arguments: method -> SGLang arguments, complete.
        alive: how many may run at a time; the longest unused one is ended for a new one.
        variables: method -> environment additions.
    """

    def __init__(
        self,
        arguments: Mapping[str, Sequence[str]],
        alive: int,
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.arguments, self.alive = dict(arguments), alive
        self._variables = variables or {}
        self._running: OrderedDict[str, ServerProcess] = OrderedDict()

    def get(self, method: str) -> ServerProcess:
        """The running server of a method."""
        server = self._running.pop(method, None)
        if server is None:
            while len(self._running) >= self.alive:
                self._running.popitem(last=False)[1].stop()
            server = ServerProcess(
                method, self.arguments[method], self._variables.get(method)
            ).start()
        elif not server.alive:
            raise BenchError(f"the {method} server has ended\n{server.log_tail()}")
        self._running[method] = server
        return server

    @property
    def alternates_freely(self) -> bool:
        """All methods stay up, so they can take turns at every measurement."""
        return self.alive >= len(self.arguments)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        while self._running:
            self._running.popitem()[1].stop()


def fleet_size(options: argparse.Namespace, count: int) -> int:
    """Servers to keep up: what --alive says, else all on a CPU and one on a GPU."""
    if options.alive:
        return options.alive
    import torch

    on_cpu = options.device == "cpu" or not torch.cuda.is_available()
    return count if on_cpu else 1


def confirm_algorithm(method: str, info: Mapping[str, Any]) -> None:
    """BenchError unless /server_info names the method's algorithm."""
    wanted = None if method == PLAIN else method.split("@")[0]
    running = info.get("speculative_algorithm")
    if (running or None) != wanted:
        raise BenchError(f"the {method} server runs {running or 'no speculation'}")


def confirm_rounds(method: str, added: Counters) -> None:
    """BenchError unless what was just measured was speculated, or was not, as the method says."""
    if added.tokens <= 0:
        raise BenchError(f"{method}: the server emitted nothing")
    if (added.rounds > 0) != (method != PLAIN):
        raise BenchError(f"{method}: {added.rounds} verify rounds for {added.tokens} tokens")


def prometheus_totals(text: str) -> dict[str, float]:
    """Samples of a /metrics page by name, summed over their labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{", 1)[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals
