"""`make serve`: find or make a target and a drafter, start SGLang on them, say how to talk to it.

This is a convenience around one command, which it prints; nothing of LongSpark needs it:

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm LONGSPARK \\
        --speculative-draft-model-path DRAFTER

Options that this file does not know are handed to SGLang as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from random_drafter import random_drafter
from smollm2 import cache_root, smollm2

START_TIMEOUT = 1800.0  # seconds; a large target on a slow disk takes its time
SMOLLM2_MASK_TOKEN = 16  # <empty_output>, one of its unused special tokens
DEMO_DRAFTER = Path(__file__).parent / "smollm2-135m-longspark"  # made by make_pair.py

# A machine without a GPU shares its memory with everything else, so the pools are small there; and
# float32 is where the CPU server's greedy output is token for token that of plain decoding.
CPU_OPTIONS = ["--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.5"]
CPU_OPTIONS += ["--max-total-tokens", "32768", "--max-running-requests", "16"]
CPU_OPTIONS += ["--sleep-on-idle"]  # else a core polls for requests all the time

READY = """
Ready at {url}. Try it from another terminal:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'

{python} - <<'EOF'
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(
    model="default",
    messages=[{{"role": "user", "content": "Write a short poem about a spark."}}],
    max_tokens=100,
    temperature=0.7,
    stream=True,
)
for part in answer:
    print(part.choices[0].delta.content or "", end="", flush=True)
print()
EOF

Ctrl-C ends the server.
"""
BODY = (
    '{"model": "default", "max_tokens": 64, "temperature": 0, '
    '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)


def progress(text: str) -> None:
    """One line for a waiting person."""
    print(f"[serve] {text}", flush=True)


def find_pair(model: str | None, draft: str | None) -> tuple[str, str]:
    """Target and drafter as SGLang takes them; what was not named is made, and said so."""
    if model is None:
        model = str(smollm2())
        draft = draft or str(DEMO_DRAFTER)
        progress("target: SmolLM2-135M-Instruct by HuggingFaceTB, dequantised from Q4_1")
    else:
        progress(f"target: {model}")
    if draft is None:
        draft = str(_random_drafter_for(model))
        progress("drafter: RANDOM (untrained, seed 0). The output is right but nothing is faster:")
        progress("         name a trained one with DRAFT=folder-or-hub-id")
    else:
        progress(f"drafter: {draft}")
    return model, draft


def _random_drafter_for(model: str) -> Path:
    """A random drafter for this target, kept in the cache."""
    place = str(Path(model).resolve()) if Path(model).exists() else model
    key = hashlib.sha256(place.encode()).hexdigest()[:12]
    final = cache_root() / f"random-drafter-{key}"
    if not final.exists():
        cache_root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix="making-") as work:
            made = random_drafter(model, Path(work) / "drafter")
            made.rename(final)
    return final


def port_is_free(port: int) -> bool:
    """Whether this port of 127.0.0.1 can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def healthy(url: str) -> bool:
    """Whether the server answers. The environment's proxy must not see a local address."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    """Return once /health answers; end the program if the server ends or takes too long."""
    started = last_line = time.monotonic()
    while not healthy(url):
        if (code := server.poll()) is not None:
            sys.exit(f"[serve] the server ended with status {code} while loading; see above")
        now = time.monotonic()
        if now - started > START_TIMEOUT:
            sys.exit(f"[serve] not ready after {START_TIMEOUT:.0f} s")
        if now - last_line >= 10:
            progress(f"loading, {now - started:.0f} s so far")
            last_line = now
        time.sleep(0.5)


def end(server: subprocess.Popen[bytes]) -> None:
    """Let the launcher end the server in good order, then whatever is left of its process group."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", help="target: folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--draft", help="folder or hub id (default: the demo drafter, with --model a random one)"
    )
    parser.add_argument("--port", type=int, default=30000)
    options, more = parser.parse_known_args()
    if not port_is_free(options.port):
        sys.exit(f"[serve] port {options.port} is in use: name another one with PORT=")
    model, draft = find_pair(options.model or None, options.draft or None)

    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--speculative-algorithm", "LONGSPARK", "--speculative-draft-model-path", draft]
    command += ["--host", "127.0.0.1", "--port", str(options.port)]
    command += ["--uvicorn-access-log-exclude-prefixes", "/health"]  # asked twice a second below
    if not torch.cuda.is_available():
        command += CPU_OPTIONS
        # One core stays free for HTTP and detokenisation: torch's threads wait for each other by
        # spinning, so the slowest of too many threads sets the pace.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    command += more
    progress(shlex.join(command))

    # SIGTERM leaves through the same `finally` as Ctrl-C, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    server = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{options.port}"
    try:
        wait_until_healthy(server, url)
        print(READY.format(url=url, body=BODY, python=sys.executable), flush=True)
        sys.exit(f"[serve] the server ended with status {server.wait()}")
    except KeyboardInterrupt:
        progress("ending the server")
    finally:
        end(server)


if __name__ == "__main__":
    main()
