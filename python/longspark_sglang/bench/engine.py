"""The other end of `engine_process`: SGLang's scheduler in a child process, asked for rounds."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspark_sglang.config import LongSparkError

START_TIMEOUT = 1800.0


class EngineError(LongSparkError):
    """The engine did not start, ended, or could not do what it was asked to."""

    def __init__(self, problem: str) -> None:
        super().__init__("the measurement engine", [problem])


class Engine:
    """One scheduler: `with Engine([...]) as engine: engine.ask("rounds", context=1024, ...)`.

    Args:
        arguments: SGLang's server arguments. Overlap scheduling is switched off, because phases
            that overlap do not add up to a round.
        timeout: seconds that one command may take.
        program: what python runs.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        timeout: float = 1800.0,
        program: Sequence[str] = ("-m", "longspark_sglang.bench.engine_process"),
    ) -> None:
        self.command = [sys.executable, *program]
        self.command += [*arguments, "--disable-overlap-schedule", "--skip-tokenizer-init"]
        self.timeout = timeout
        self.info: dict[str, Any] = {}
        self._log = tempfile.NamedTemporaryFile(prefix="longspark-bench-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[str] | None = None

    def launch(self) -> Engine:
        """Start the process without waiting, so that several can load at the same time."""
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.fileno(),
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")},
        )
        return self

    def wait(self) -> Engine:
        """Wait until it is loaded; fills `info`."""
        self.info = self._read(START_TIMEOUT)
        return self

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        """One command of `EngineProcess`. Raises EngineError with the process's own words."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(f"the engine has ended\n{self.log_tail()}") from error
        return self._read(self.timeout)

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
        process.stdout.close()
        self._log.close()

    def log_tail(self, lines: int = 30) -> str:
        """The end of what SGLang wrote."""
        text = Path(self._log.name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Engine:
        return self.launch().wait()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while not select.select([self._process.stdout], [], [], 1.0)[0]:
            if time.monotonic() > deadline:
                raise EngineError(f"no answer within {timeout:.0f} s\n{self.log_tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the engine has ended\n{self.log_tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{reply['error']}\n{self.log_tail(10)}")
        return reply["answer"]
