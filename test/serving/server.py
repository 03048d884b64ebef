"""The real `python -m sglang.launch_server` as a context manager, and its clients.

A server is a process group of its own that writes to one log file. Leaving the context ends the
whole group; a server that dies while it starts raises with the end of its log.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import torch

# What /generate takes beside the sampling parameters.
REQUEST_FIELDS = frozenset(
    {
        "rid",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "return_hidden_states",
        "extra_key",
        "priority",
    }
)
Prompt = str | Sequence[int]
QUICK_START = Path(__file__).with_name("quick_start")  # its sitecustomize.py says what it does
# The tests' targets and drafts in SGLang, which imports 250 such files unless it is told not to.
MODEL_FILES = frozenset({"dflash", "dspark", "llama", "llama_eagle3", "mellum", "qwen2", "qwen3"})


class ServerError(RuntimeError):
    """The server did not start, died, or answered with an error; holds the end of its log."""


class Server:
    """One server: ``with Server(target, draft) as server: server.generate([5, 6, 7])``.

    ``algorithm`` defaults to LONGSPARK where ``draft`` is given. ``extra_args`` are appended to the
    command line, so they win over the defaults here; ``env`` is added to the environment.
    Pools are small on purpose: ``max_total_tokens`` rows of KV cache; with None SGLang sizes them
    by ``--mem-fraction-static``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        draft: str | os.PathLike[str] | None = None,
        algorithm: str | None = None,
        *,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        dtype: str = "float32",
        page_size: int = 1,
        tp: int = 1,
        max_total_tokens: int | None = 40_000,
        context_length: int | None = 8192,
        start_timeout: float = 300.0,
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", dtype]
        self.command += ["--page-size", str(page_size), "--tp-size", str(tp)]
        if max_total_tokens is not None:
            self.command += ["--max-total-tokens", str(max_total_tokens)]
        self.command += ["--mem-fraction-static", "0.3", "--enable-metrics"]
        # An idle scheduler polls in a busy loop otherwise, and takes a core from the server in use.
        self.command += ["--sleep-on-idle"]
        self.command += ["--uvicorn-access-log-exclude-prefixes", "/health"]
        if context_length is not None:
            self.command += ["--context-length", str(context_length)]
        if algorithm or draft:
            self.command += ["--speculative-algorithm", algorithm or "LONGSPARK"]
        if draft:
            self.command += ["--speculative-draft-model-path", str(draft)]
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": _python_path(QUICK_START),
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_model_files()),
        }
        if not torch.cuda.is_available():
            self.command += ["--device", "cpu"]
            if tp > 1:  # without it SGLang wants one NUMA node per rank
                cores = os.cpu_count() or 1
                binding = "|".join(str(rank % cores) for rank in range(tp))
                self.env["SGLANG_CPU_OMP_THREADS_BIND"] = binding
        self.command += [str(argument) for argument in extra_args]
        self.env.update(env or {})
        self.start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_log: str | None = None
        # Neither client may be led to a proxy by the environment: all traffic is local.
        self._http = httpx.Client(base_url=self.url, trust_env=False, timeout=300.0)

    # -- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Server:
        """Start the process, return once it is healthy; `ServerError` if it dies or takes long."""
        descriptor, name = tempfile.mkstemp(prefix="longspark-server-", suffix=".log")
        self.log_path, self._ended_log = Path(name), None
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        deadline = time.monotonic() + self.start_timeout
        try:
            while not self.healthy():
                if not self.alive:
                    raise ServerError(f"the server ended while starting\n{self.log_tail()}")
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"the server was not ready in {self.start_timeout:.0f} s\n{self.log_tail()}"
                    )
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the whole process group, whatever state it is in; its log stays readable."""
        process, self._process = self._process, None
        if process is None:
            return
        family = []
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # the launcher alone: it ends the others in good order
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        # Ranks and the detokenizer outlive a parent that was killed before it could end them.
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family, timeout=10)
        self._ended_log = self.log
        self.log_path.unlink()

    @property
    def alive(self) -> bool:
        """Whether the launcher still runs."""
        return self._process is not None and self._process.poll() is None

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def log(self) -> str:
        """Everything that the server has written so far."""
        if self._ended_log is not None:
            return self._ended_log
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        """The command and the last lines of the log, for error messages."""
        return "\n".join([" ".join(self.command), *self.log.splitlines()[-lines:]])

    # -- clients ------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, *, timeout: float = 300.0, **parameters: Any
    ) -> dict[str, Any]:
        """One native /generate call; the answer as SGLang gives it (output_ids, text, meta_info).

        Temperature is 0 and max_new_tokens 32 unless given. Names in `REQUEST_FIELDS` go beside the
        sampling parameters, all others into them.
        """
        return self.post("/generate", self._request(prompt, parameters), timeout=timeout).json()

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = 32,
        timeout: float = 300.0,
        **parameters: Any,
    ) -> list[dict[str, Any]]:
        """`generate` for each prompt from ``concurrency`` threads; answers in order of prompts."""
        with ThreadPoolExecutor(concurrency) as threads:
            return list(
                threads.map(lambda p: self.generate(p, timeout=timeout, **parameters), prompts)
            )

    def stream(self, prompt: Prompt, **parameters: Any) -> Iterator[dict[str, Any]]:
        """The chunks of one streamed /generate call, as they come."""
        body = {**self._request(prompt, parameters), "stream": True}
        with self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                raise ServerError(f"/generate: {response.status_code} {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    @property
    def openai(self) -> openai.OpenAI:
        """A client of the OpenAI-compatible API; any model name is accepted."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.Client(trust_env=False, timeout=300.0),
        )

    def get(self, path: str, **keywords: Any) -> httpx.Response:
        """GET; `ServerError` with the server's own words unless it answers 200."""
        return self._checked(path, self._http.get(path, **keywords))

    def post(self, path: str, body: Any = None, **keywords: Any) -> httpx.Response:
        """POST of a JSON body; `ServerError` with the server's own words unless it answers 200."""
        return self._checked(path, self._http.post(path, json=body, **keywords))

    def server_info(self) -> dict[str, Any]:
        """/server_info: server arguments and ``internal_states`` (one per scheduler)."""
        return self.get("/server_info").json()

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, summed over their labels."""
        samples: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{", 1)[0]
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def flush(self, timeout: float = 30.0) -> None:
        """Empty the prefix cache; waits, since SGLang refuses while a request is still leaving."""
        deadline = time.monotonic() + timeout
        while True:
            response = self._http.post("/flush_cache")
            if response.status_code == 200:
                return
            if time.monotonic() > deadline:
                raise ServerError(f"/flush_cache: {response.status_code} {response.text}")
            time.sleep(0.1)

    def abort(self, rid: str) -> None:
        """Ask for the end of one request; its caller gets what was generated so far."""
        self.post("/abort_request", {"rid": rid})

    def _request(self, prompt: Prompt, parameters: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {}
        if not isinstance(prompt, str):
            body["input_ids"] = list(prompt)
        sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32}
        for name, value in parameters.items():
            (body if name in REQUEST_FIELDS else sampling)[name] = value
        return {**body, "sampling_params": sampling}

    def _checked(self, path: str, response: httpx.Response) -> httpx.Response:
        if response.status_code == 200:
            return response
        tail = "" if self.alive else f"\nthe server has ended\n{self.log_tail()}"
        raise ServerError(f"{path}: {response.status_code} {response.text[:2000]}{tail}")


class ServerPool:
    """Servers by their arguments; at most ``alive`` at a time, the longest unused is ended first.

    Starting one takes far longer than most tests, so tests that want the same server share it.
    """

    def __init__(self, alive: int = 2) -> None:
        self.alive = alive
        self._servers: OrderedDict[str, Server] = OrderedDict()

    def get(self, *arguments: Any, **keywords: Any) -> Server:
        """A running `Server` with these arguments, with an empty prefix cache."""
        call = inspect.signature(Server).bind(*arguments, **keywords)
        call.apply_defaults()
        key = json.dumps(call.arguments, sort_keys=True, default=str)
        server = self._servers.pop(key, None)
        if server is not None and not server.alive:
            server.stop()
            server = None
        if server is None:
            while len(self._servers) >= self.alive:
                self._servers.popitem(last=False)[1].stop()
            server = Server(*arguments, **keywords).start()
        self._servers[key] = server
        server.flush()
        return server

    def stop_all(self) -> None:
        """End every server."""
        while self._servers:
            self._servers.popitem()[1].stop()


def _end_with_parent() -> None:
    """In the child: die when the test process does, however that ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _other_model_files() -> list[str]:
    """Names of SGLang's model files but `MODEL_FILES`, without an import of SGLang."""
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations
    folder = Path(sglang.submodule_search_locations[0]) / "srt/models"
    return sorted({path.stem for path in folder.glob("*.py")} - MODEL_FILES)


def _python_path(first: Path) -> str:
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
