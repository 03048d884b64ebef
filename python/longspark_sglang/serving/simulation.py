"""Simulated acceptance: SGLang's benchmark knob SGLANG_SIMULATE_ACC_LEN, followed by our worker.

With it a round costs what it always costs but commits a chosen number of tokens, so that speed can
be measured without a trained drafter and break-even accept lengths can be found. The output is then
NOT the target's. Names, defaults and meaning are those of SGLang 0.5.23 for its own algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_utils import sample_simulated_acc_len

from longspark_sglang.serving.acceptance import Decision

METHODS = ("match-expected", "multinomial")
TOKEN_MODES = ("fixed", "real-draft-token")
FIXED_TOKEN = 100  # what SGLang's own algorithms emit in mode "fixed"


@dataclass(frozen=True)
class SimulatedAcceptance:
    """How many tokens each round commits, whatever the drafts are.

    Attributes:
        length: mean accept length, the bonus token included; each round's is within 1..width.
        method: "match-expected" (the two whole numbers next to `length`, so that the mean is right)
            or "multinomial" (a rounded normal draw of deviation 1).
        token_mode: "fixed" emits token 100 everywhere, "real-draft-token" the drafts followed by
            the target's most likely token.
    """

    length: float
    method: str
    token_mode: str

    @classmethod
    def from_environment(cls, vocab_size: int) -> SimulatedAcceptance | None:
        """What the environment asks for; None where SGLANG_SIMULATE_ACC_LEN is unset or not above
        0. Raises ValueError with everything that is wrong.
        """
        length = float(envs.SGLANG_SIMULATE_ACC_LEN.get())
        if not length > 0:
            return None
        method = envs.SGLANG_SIMULATE_ACC_METHOD.get()
        token_mode = envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get()
        reasons = [
            f"{name} is {value!r}; use {' or '.join(known)}"
            for name, value, known in (
                ("SGLANG_SIMULATE_ACC_METHOD", method, METHODS),
                ("SGLANG_SIMULATE_ACC_TOKEN_MODE", token_mode, TOKEN_MODES),
            )
            if value not in known
        ]
        if token_mode == "fixed" and vocab_size <= FIXED_TOKEN:
            reasons.append(
                f"the target has {vocab_size} tokens and mode fixed emits token {FIXED_TOKEN}; "
                "set SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token"
            )
        if reasons:
            raise ValueError("simulated acceptance: " + "; ".join(reasons))
        return cls(length, method, token_mode)

    @property
    def warning(self) -> str:
        """The line that nobody may overlook in the log."""
        return (
            f"LONGSPARK: SGLANG_SIMULATE_ACC_LEN={self.length:g} ({self.method}, "
            f"{self.token_mode}): ACCEPTANCE IS SIMULATED, so the output is NOT the target's. "
            "For measurements only; unset it to serve."
        )

    def as_dict(self) -> dict[str, Any]:
        """What /server_info shows."""
        return {"length": self.length, "method": self.method, "token_mode": self.token_mode}

    def apply(
        self,
        decision: Decision,
        candidates: torch.Tensor,
        limit: torch.Tensor,
        broadcast: Callable[[torch.Tensor], torch.Tensor],
    ) -> Decision:
        """`decision` with this round's simulated number of tokens, the same for all requests.

        Args:
            candidates: [B, K+1] int64, anchors and drafts.
            limit: [B] int32, the most drafts each request may accept: 0 stays 0.
            broadcast: rank 0's values on every rank.
        """
        batch_size, width = candidates.shape
        count = sample_simulated_acc_len(self.length, self.method, width)
        accept_lens = broadcast((limit + 1).clamp(max=count).to(torch.int32))
        last = (accept_lens - 1).to(torch.int64)
        if self.token_mode == "fixed":
            next_token = torch.full_like(decision.next_token, FIXED_TOKEN)
            tokens = torch.full_like(candidates, FIXED_TOKEN)
        else:
            rows = torch.arange(batch_size, device=last.device)
            best = decision.logits.view(batch_size, width, -1)[rows, last].argmax(dim=-1)
            next_token = broadcast(best)
            tokens = torch.cat((candidates[:, 1:], next_token[:, None]), dim=1)
            tokens.scatter_(1, last[:, None], next_token[:, None])
        return replace(
            decision,
            accepted=accept_lens - 1,
            accept_lens=accept_lens,
            next_token=next_token,
            tokens=tokens.view(-1),
        )
