"""`make serve`'s front-end: starts a pair, prints a curl line and a Python snippet that work."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SERVE = Path(__file__).parents[2] / "examples/serve.py"
START_TIMEOUT = 300.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_pasted(text: str) -> str:
    """What a person gets who pastes this into a shell."""
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_printed_snippets_work_as_pasted(tiny_target: Path, tmp_path: Path) -> None:
    """No DRAFT is given: it makes a random drafter, says so, and serves."""
    command = [sys.executable, str(SERVE), "--model", str(tiny_target), "--port", str(free_port())]
    environment = {**os.environ, "LONGSPARK_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        serve = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A shell's background jobs, of which the tests may be one, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while "Ctrl-C ends the server" not in log.read_text():
            assert serve.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.5)
        printed = log.read_text()
        assert "drafter: RANDOM (untrained" in printed
        assert "--speculative-algorithm LONGSPARK" in printed

        (curl,) = re.findall(r"^curl .*$", printed, re.MULTILINE)
        answer = json.loads(run_pasted(curl))
        assert answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens"] == 64

        (snippet,) = re.findall(r"^\S+ - <<'EOF'$.*?^EOF$", printed, re.MULTILINE | re.DOTALL)
        assert len(run_pasted(snippet).strip()) > 20
    finally:
        serve.send_signal(signal.SIGINT)
        try:
            code = serve.wait(timeout=60)
        except subprocess.TimeoutExpired:
            serve.terminate()  # it ends its server then too
            raise
    assert code == 0, log.read_text()[-5000:]


def test_a_port_in_use_is_named(tiny_target: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, str(SERVE), "--model", str(tiny_target), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert f"port {port} is in use: name another one with PORT=" in done.stderr
