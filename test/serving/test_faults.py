"""Faults put into a running server: what becomes of the requests, and that nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serving.server import Server, ServerError, ServerPool
from serving.workload import free_counts, state, words

ROWS, POOL = 8, 3000
HEALTH_TIMEOUT = 3  # seconds that /health waits for a sign of life
PHASES = ("propose", "verify", "commit")

# A plugin of its own, loaded as any other: raises in a phase of the round once a file names it.
FAULT_PLUGIN = """
import os
from pathlib import Path

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SERVING = "longspark_sglang.serving"
TARGETS = {
    "propose": f"{SERVING}.drafter_runner.DrafterRunner.propose",
    "verify": f"{SERVING}.worker.LongSparkWorker._verify",
    "commit": f"{SERVING}.summary_store.SummaryStore.commit",
}


def faulty(phase):
    asked_for = Path(os.environ["FAULT_FILE"])

    def hook(original, *args, **kwargs):
        if asked_for.exists() and asked_for.read_text() == phase:
            raise RuntimeError(f"injected into {phase}")
        return original(*args, **kwargs)

    return hook


def register():
    for phase, target in TARGETS.items():
        HookRegistry.register(target, faulty(phase), HookType.AROUND)
"""


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "phase"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, fault_file: Path) -> dict[str, Any]:
    """One setting for all servers of this file: with the plugin, a small pool, a quick /health."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "fault_plugin.py").write_text(FAULT_PLUGIN)
    metadata = folder / "fault_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fault-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nfaults = fault_plugin:register\n"
    )
    path = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "max_total_tokens": POOL,
        "extra_args": ("--chunked-prefill-size", "512", "--max-running-requests", ROWS),
        "env": {
            "LONGSPARK_CHECK": "1",
            "PYTHONPATH": os.pathsep.join(path),
            "FAULT_FILE": str(fault_file),
            "SGLANG_HEALTH_CHECK_TIMEOUT": str(HEALTH_TIMEOUT),
        },
    }


@pytest.fixture
def server(
    servers: ServerPool,
    tiny_target: Path,
    tiny_drafter: Path,
    options: dict[str, Any],
    fault_file: Path,
) -> Iterator[Server]:
    fault_file.unlink(missing_ok=True)
    server = servers.get(tiny_target, tiny_drafter, **options)
    yield server
    fault_file.unlink(missing_ok=True)


def plainly(server: Server, ids: list[int], tokens: int) -> list[int]:
    """The answer of plain decoding, from the same server."""
    off = {"longspark": {"enabled": False}}
    reply = server.generate(ids, max_new_tokens=tokens, ignore_eos=True, custom_params=off)
    return reply["output_ids"]


def free_rows(server: Server) -> int:
    return state(server)["free_request_rows"]


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what this test waits for did not happen"
        time.sleep(0.05)


def family(server: Server) -> list[psutil.Process]:
    """The launcher and all of its processes."""
    assert server._process is not None
    launcher = psutil.Process(server._process.pid)
    return [launcher, *launcher.children(recursive=True)]


# -- clients --------------------------------------------------------------------------------------

STREAMING_CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
sampling = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
body = {"input_ids": json.loads(sys.argv[2]), "sampling_params": sampling, "stream": True}
connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
response = connection.getresponse()
while line := response.readline():
    print(line, flush=True)
"""


def test_a_client_that_is_killed_gives_its_row_back(server: Server) -> None:
    expected = plainly(server, words(60, 1), 300)
    before = free_counts(server)
    client = subprocess.Popen(
        [sys.executable, "-c", STREAMING_CLIENT, str(server.port), str(words(50, 2))],
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline().startswith(b"b'data:"), "no token came"
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(server.generate, words(60, 1), max_new_tokens=300, ignore_eos=True)
        client.send_signal(signal.SIGKILL)
        client.wait()
        assert other.result()["output_ids"] == expected
    # Its 2000 tokens are not generated to the end.
    wait_until(lambda: free_rows(server) == ROWS, 10)
    assert free_counts(server) == before


# -- processes that stand still -------------------------------------------------------------------


def test_a_server_that_was_stopped_goes_on_where_it_was(server: Server) -> None:
    expected = plainly(server, words(60, 3), 300)
    stream = server.stream(words(60, 3), max_new_tokens=300, ignore_eos=True)
    first = next(stream)
    processes = family(server)
    for process in processes:
        process.suspend()
    try:
        time.sleep(2)
        with pytest.raises(httpx.TimeoutException):
            server._http.get("/health", timeout=1)
    finally:
        for process in processes:
            process.resume()
    assert len(first["output_ids"]) < 300
    assert [*stream][-1]["output_ids"] == expected
    assert server.healthy()


def test_health_says_when_the_scheduler_does_not_answer(server: Server) -> None:
    (scheduler,) = [p for p in family(server) if "scheduler" in " ".join(p.cmdline())]
    scheduler.suspend()
    try:
        status = server._http.get("/health", timeout=HEALTH_TIMEOUT + 20).status_code
    finally:
        scheduler.resume()
    assert status == 503
    wait_until(lambda: server._http.get("/health", timeout=60).status_code == 200)
    assert len(server.generate(words(5, 4))["output_ids"]) > 0


# -- memory ---------------------------------------------------------------------------------------


def test_out_of_kv_memory(server: Server) -> None:
    """Too large for the pool alone: refused. Too large together: all are served, one by one."""
    before = free_counts(server)
    with pytest.raises(ServerError, match="/generate: 400"):
        server.generate(words(POOL + 100, 5), max_new_tokens=10, ignore_eos=True)
    # Alone in the pool and still too long: ends at the pool's end, or is refused; never a hang.
    try:
        reply = server.generate(words(2000, 6), max_new_tokens=5000, ignore_eos=True)
        assert reply["meta_info"]["finish_reason"]["type"] in ("length", "abort")
        assert len(reply["output_ids"]) <= POOL - 2000
    except ServerError as error:
        assert "/generate: 400" in str(error) or "abort" in str(error).lower()
    prompts = [words(600, 10 + i) for i in range(ROWS)]
    expected = [plainly(server, ids, 100) for ids in prompts]
    replies = server.generate_many(prompts, concurrency=ROWS, max_new_tokens=100, ignore_eos=True)
    assert [reply["output_ids"] for reply in replies] == expected
    assert free_counts(server) == before


# -- the end --------------------------------------------------------------------------------------


def test_sigterm_lets_requests_finish_and_then_ends(server: Server) -> None:
    expected = plainly(server, words(60, 7), 400)
    stream = server.stream(words(60, 7), max_new_tokens=400, ignore_eos=True)
    first = next(stream)
    processes = family(server)
    processes[0].send_signal(signal.SIGTERM)
    wait_until(lambda: server._http.get("/health", timeout=60).status_code == 503, 10)
    assert len(first["output_ids"]) < 400
    assert [*stream][-1]["output_ids"] == expected
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, alive


@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_in_a_round_ends_the_server_and_every_request(
    server: Server, fault_file: Path, phase: str
) -> None:
    """The state of a half-done round is unknown, so the process ends and a supervisor restarts."""
    assert (
        len(server.generate(words(20, 8), max_new_tokens=20, ignore_eos=True)["output_ids"]) == 20
    )
    processes = family(server)
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(server.generate, words(20, 20 + i), max_new_tokens=700, ignore_eos=True)
            for i in range(3)
        ]
        wait_until(lambda: free_rows(server) < ROWS)
        fault_file.write_text(phase)
        for future in asked:
            with pytest.raises((ServerError, httpx.HTTPError)):
                future.result(timeout=60)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, alive
    assert f"RuntimeError: injected into {phase}" in server.log
    assert not server.healthy()
