"""A fake SGLang server for the tests of `longspark verify`: a toy model behind real HTTP shapes.

The toy model has one token per character and a fixed next token per context, so that decoding is
reproducible. `faults` names what the server does wrong; each is one kind of real fault.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WIDTH = 8
DRAFTS_PER_ROUND = 3
BEST, SECOND = -0.25, -2.5  # log-probabilities of the two best tokens


class FakeServer:
    """`with FakeServer({"nothing accepted"}) as server: ... server.url`."""

    def __init__(self, faults: Iterable[str] = ()) -> None:
        self.faults = set(faults)
        self.flushes = 0
        self._cache: list[list[int]] = []
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake._answer(self, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                fake._answer(self, json.loads(self.rfile.read(length) or b"{}"))

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> FakeServer:
        # A short poll interval, since shutdown() waits for one.
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(timeout=10)

    # -- http --------------------------------------------------------------------------------------

    def _answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        path = handler.path.split("?")[0]
        status, content = 200, ""
        if "answers html" in self.faults:
            content = "<html>a proxy's welcome page</html>"
        elif path == "/server_info":
            content = json.dumps(self._info())
        elif path == "/flush_cache":
            status, content = self._flush()
        elif path == "/generate" and "generate fails" in self.faults:
            status, content = 500, '{"error": {"message": "out of memory"}}'
        elif path == "/generate":
            content = json.dumps(self._generate(body))
        elif path == "/v1/completions" and body.get("stream"):
            content = "".join(f"data: {json.dumps(e)}\n\n" for e in self._stream(body))
            content += "data: [DONE]\n\n"
        elif path == "/v1/completions":
            content = json.dumps(self._complete(body))
        else:
            status, content = 404, "no such path"
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content.encode())))
        handler.end_headers()
        handler.wfile.write(content.encode())

    def _info(self) -> dict[str, Any]:
        return {
            "model_path": "toy",
            "dtype": "float32",
            "version": "0.5.23",
            "speculative_algorithm": None if "plain server" in self.faults else "LONGSPARK",
            "speculative_num_draft_tokens": WIDTH,
            "max_req_input_len": 100 if "small context" in self.faults else 8000,
            "disable_radix_cache": "radix cache off" in self.faults,
        }

    def _flush(self) -> tuple[int, str]:
        if "flush is refused" in self.faults:
            return 400, "Flush cache failed: requests are running"
        self.flushes += 1
        if "flush does nothing" not in self.faults:
            with self._lock:
                self._cache.clear()
        return 200, "Cache flushed."

    # -- model -------------------------------------------------------------------------------------

    @staticmethod
    def _next(ids: list[int]) -> int:
        value = 7
        for token in ids[-6:]:
            value = (value * 131 + token + len(ids)) % 1_000_003
        return ord("a") + value % 26

    def _decode(
        self, prompt: list[int], parameters: dict[str, Any], speculates: bool, logprobs: bool
    ) -> dict[str, Any]:
        """Output ids, text, finish reason and meta of one request."""
        with self._lock:
            cached = max((_common(prompt, old) for old in self._cache), default=0)
            if "cache never hits" in self.faults or "radix cache off" in self.faults:
                cached = 0
            cached = min(cached, len(prompt) - 1)
            if logprobs:
                self._seen[(speculates, *prompt)] += 1
            second_time = self._seen[(speculates, *prompt)] == 2 and cached > 0
        wrong_at = {
            "wrong token": 10 if speculates else None,
            "wrong token when warm": 5 if speculates and cached else None,
            "wrong token the second time": 3 if speculates and second_time else None,
            "wrong token at a tie": 9 if speculates and prompt[0] == ord("T") else None,
            "arithmetic depends on the batch": 3 if second_time else None,
        }
        wrong = {at for name, at in wrong_at.items() if name in self.faults}
        stop = list(parameters.get("stop") or [])
        stop_ids = parameters.get("stop_token_ids") or []
        limit = int(parameters.get("max_new_tokens", 16))
        ids: list[int] = []
        finish: dict[str, Any] = {"type": "length", "length": limit}
        while len(ids) < limit:
            token = self._next(prompt + ids)
            ids.append(token + 1 if len(ids) in wrong else token)
            text = _text(ids)
            hit = next((s for s in stop if s in text), None)
            if ids[-1] in stop_ids:
                hit = ids[-1]
            if hit is not None and "stop is missed" not in self.faults:
                finish = {"type": "stop", "matched": hit}
                break
        text = _text(ids)
        if finish["type"] == "stop":
            cut = text.find(finish["matched"]) if stop else len(ids) - 1
            text = text[:cut]
            if speculates and "ids run past the stop" in self.faults:
                ids.append(self._next(prompt + ids))
            if speculates and "text runs past the stop" in self.faults:
                text = _text(ids)
        with self._lock:
            self._cache.append(prompt + ids[:-1])
        return {
            "ids": ids,
            "text": text,
            "finish": finish,
            "meta": self._meta(prompt, ids, finish, cached, speculates, logprobs),
        }

    def _meta(
        self,
        prompt: list[int],
        ids: list[int],
        finish: dict[str, Any],
        cached: int,
        speculates: bool,
        logprobs: bool,
    ) -> dict[str, Any]:
        faults = self.faults
        drafts = speculates and not faults & {"nothing accepted", "one draft accepted"}
        if "drafts fail when warm" in faults and cached:
            drafts = False
        if "switch is ignored" in faults:
            drafts = True
        rounds = max(1, (len(ids) - 1) // (DRAFTS_PER_ROUND + 1 if drafts else 1))
        meta: dict[str, Any] = {
            "prompt_tokens": len(prompt) + ("prompt counted wrong" in faults),
            "completion_tokens": len(ids) - ("usage counts drafts wrong" in faults),
            "cached_tokens": cached,
            "finish_reason": finish,
        }
        if "plain server" not in faults and "no spec fields" not in faults:
            meta["spec_verify_ct"] = rounds
            meta["spec_num_correct_drafts"] = rounds * DRAFTS_PER_ROUND if drafts else 0
            if speculates and "one draft accepted" in faults:
                meta["spec_num_correct_drafts"] = 1
        if finish["type"] == "length" and "ends early" in faults and speculates:
            ids.pop()
            meta["completion_tokens"] = len(ids)
        if "aborts" in faults and speculates:
            meta["finish_reason"] = {"type": "abort"}
        if logprobs:
            gap = 0.001 if "wrong token at a tie" in faults else BEST - SECOND
            entries = [(BEST, token, chr(token)) for token in ids]
            # The second best is one up, or one down of a token that was bent up.
            tops = []
            for at, token in enumerate(ids):
                true = self._next(prompt + ids[:at])
                other = true if token != true else token + 1
                tops.append([(BEST, token, chr(token)), (BEST - gap, other, chr(other))])
            if speculates and "log-probabilities are shifted" in faults:
                entries = entries[1:] + entries[:1]
            if speculates and "log-probabilities are missing" in faults:
                entries = entries[:-2]
            if speculates and "log-probabilities are of drafts" in faults:
                entries = [(value - 1.0, token, text) for value, token, text in entries]
            if speculates and "log-probabilities are off" in faults:
                entries = [(value - 1.0, token, text) for value, token, text in entries]
                tops = [[(value - 1.0, token, text) for value, token, text in top] for top in tops]
            meta["output_token_logprobs"] = entries
            meta["output_top_logprobs"] = tops
        return meta

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("input_ids") or _ids(body["text"])
        parameters = body["sampling_params"]
        choice = (parameters.get("custom_params") or {}).get("longspark") or {}
        speculates = choice.get("enabled", True) and "plain server" not in self.faults
        done = self._decode(prompt, parameters, speculates, bool(body.get("return_logprob")))
        answer = {
            "text": done["text"],
            "output_ids": done["ids"],
            "meta_info": done["meta"],
            "prompt_token_ids": prompt,
        }
        if "answer lacks ids" in self.faults:
            del answer["output_ids"]
        return answer

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        parameters = {"max_new_tokens": body["max_tokens"]}
        return self._decode(_ids(body["prompt"]), parameters, True, False)

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        done = self._completion(body)
        n = 1 if "n is ignored" in self.faults else body.get("n", 1)
        counted = 1 if "usage of one choice" in self.faults else n
        tokens = len(done["ids"])
        choices = [
            {
                "index": i,
                "text": done["text"] + "!" * ("choices differ" in self.faults and i == 1),
                "finish_reason": done["finish"]["type"],
                "logprobs": {"tokens": [chr(token) for token in done["ids"]]},
            }
            for i in range(n)
        ]
        prompt_tokens = len(_ids(body["prompt"]))
        return {
            "choices": choices,
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": counted * tokens},
        }

    def _stream(self, body: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if "stream fails" in self.faults:
            yield {"error": {"message": "the scheduler died"}}
            return
        done = self._completion(body)
        pieces = [done["text"][i : i + 5] for i in range(0, len(done["text"]), 5)]
        if "stream loses a chunk" in self.faults:
            del pieces[1]
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            reason = done["finish"]["type"] if last else None
            yield {"choices": [{"index": 0, "text": piece, "finish_reason": reason}]}
        prompt_tokens = len(_ids(body["prompt"]))
        if "stream lacks usage" not in self.faults:
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(done["ids"])}
            yield {"choices": [], "usage": usage}


def _ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def _text(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids)


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
