"""A stand-in for SGLang's /generate that fails as told, for the tests of regeneration."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FlakyServer:
    """`with FlakyServer(fail_first=2) as server: ... server.url, server.asked`.

    Each prompt fails ``fail_first`` times and is then answered with its own ids backwards.
    ``asked`` counts the requests by prompt; ``bodies`` keeps them.
    """

    def __init__(self, fail_first: int = 0) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"model_path": "toy", "dtype": "float32", "version": "0.5.23"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ids = body["input_ids"]
                with lock:
                    server.bodies.append(body)
                    server.asked[tuple(ids)] += 1
                    fails = server.asked[tuple(ids)] <= fail_first
                if fails:
                    self.answer(500, {"error": "out of memory"})
                    return
                meta = {"finish_reason": {"type": "length"}}
                answer = {"output_ids": ids[::-1], "text": "x", "meta_info": meta}
                self.answer(200, {**answer, "prompt_token_ids": ids})

            def answer(self, status: int, content: dict[str, Any]) -> None:
                encoded = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> FlakyServer:
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(timeout=10)
