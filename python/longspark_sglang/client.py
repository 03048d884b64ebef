"""A small HTTP client of a running SGLang server; the standard library is all it needs."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SWITCHED_OFF = {"longspark": {"enabled": False}}


class ServerError(RuntimeError):
    """The server cannot be reached, answers with an error, or with something unreadable."""


@dataclass(frozen=True)
class Answer:
    """One answer of the native /generate.

    Attributes:
        asked: `max_new_tokens` of the request.
        ids: output token ids.
        text: the output text.
        meta: SGLang's meta_info.
        prompt_ids: token ids of the prompt as the server tokenised it.
    """

    asked: int
    ids: list[int]
    text: str
    meta: dict[str, Any]
    prompt_ids: list[int]

    @property
    def rounds(self) -> int:
        """Rounds of speculation; 0 where the server runs none."""
        return int(self.meta.get("spec_verify_ct") or 0)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted in all rounds; bonus tokens are not counted."""
        return int(self.meta.get("spec_num_correct_drafts") or 0)

    @property
    def logprobs(self) -> list[Any]:
        """(log-probability, token id, token text) of each output token, if asked for."""
        return self.meta.get("output_token_logprobs") or []

    @property
    def top_logprobs(self) -> list[Any]:
        """Per output token the most probable tokens as (log-probability, id, text), best first."""
        return self.meta.get("output_top_logprobs") or []


class ServerClient:
    """Requests to one server.

    Proxies named in the environment are not used: the server is a machine one can reach.

    Args:
        url: http(s)://host:port, with or without a trailing slash.
        timeout: seconds to wait for each answer.
        api_key: sent as a bearer token.
    Raises:
        ValueError: not an http(s) URL.
    """

    def __init__(self, url: str, timeout: float = 120.0, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{url!r} is no server address: use http://host:port")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    # -- transport ---------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """The JSON that GET `path` answers. Raises ServerError."""
        return self._json(path, self._read("GET", path, None))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that POST `path` answers. Raises ServerError."""
        return self._json(path, self._read("POST", path, body))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """The JSON chunks of a streamed answer. Raises ServerError."""
        for line in self._read("POST", path, body).splitlines():
            if line.startswith("data:") and line != "data: [DONE]":
                yield self._json(path, line.removeprefix("data:"))

    def _read(self, method: str, path: str, body: dict[str, Any] | None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers=self._headers, method=method
        )
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                return response.read().decode("utf-8", errors="replace")
        except urllib.error.HTTPError as error:
            words = " ".join(error.read().decode("utf-8", errors="replace").split())
            raise ServerError(f"{path} answered {error.code}: {words[:500]}") from error
        except TimeoutError as error:
            raise ServerError(f"{path} did not answer within {self.timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", None) or error
            raise ServerError(f"{self.url}{path} cannot be reached: {reason}") from error

    def _json(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerError(f"{path} answered no JSON but {text[:80]!r}") from error

    # -- requests ----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        tokens: int,
        *,
        speculate: bool = True,
        logprobs: bool = False,
        **sampling: Any,
    ) -> Answer:
        """One greedy native request.

        Args:
            prompt: text or token ids.
            tokens: `max_new_tokens`.
            speculate: False switches LONGSPARK off for this request.
            logprobs: ask for the log-probabilities of the output and of its two best tokens.
            sampling: further sampling parameters.
        Raises:
            ServerError: no answer, or one without ids and meta_info.
        """
        body: dict[str, Any] = {"return_prompt_token_ids": True}
        if isinstance(prompt, str):
            body["text"] = prompt
        else:
            body["input_ids"] = list(prompt)
        if logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, **sampling}
        if not speculate:
            sampling["custom_params"] = SWITCHED_OFF
        answer = self.post("/generate", {**body, "sampling_params": sampling})
        try:
            return Answer(
                asked=tokens,
                ids=list(answer["output_ids"]),
                text=answer["text"] or "",
                meta=dict(answer["meta_info"]),
                prompt_ids=list(answer["prompt_token_ids"]),
            )
        except (KeyError, TypeError) as error:
            raise ServerError(f"/generate answered without {error}: {str(answer)[:200]}") from error

    def flush(self) -> None:
        """Empty the prefix cache, waiting for the last request to leave. Raises ServerError."""
        self._read("POST", f"/flush_cache?timeout={min(self.timeout, 30):g}", {})
