"""`longspark verify URL`: does a running server speculate, and exactly?

Only what a client can see is used, so a check fails for whatever reason the answer is wrong. Plain
decoding, the yardstick, is the same server with speculation switched off per request, or another
server (`--reference`), which also shows faults of the verify pass itself.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from longspark_sglang.client import Answer, ServerClient, ServerError
from longspark_sglang.report import Finding, Report

ALGORITHM = "LONGSPARK"
MIN_TOKENS = 8
MAX_CONCURRENCY = 32
# A round costs a draft and a wider pass, so a drafter that gains less than a tenth only costs time;
# a random one gets a few hundredths by accident.
MIN_ACCEPT_LENGTH = 1.1
# Warm requests with less than this share of the cold ones' accepted drafts lost their state; below
# a few dozen drafts chance decides, so three standard deviations of a count are granted as well.
WARM_SHARE = 0.8
# Mean difference of log-probabilities, in nats, that rounding alone does not reach.
LOGPROB_TOLERANCE = 0.1
STOPS_PER_PROMPT = 3
SHOWN = 5  # details per finding; the rest is counted

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.\n\ndef fibonacci(n):",
    "Copy these names exactly, in this order: qX7_delta, Brzl-09, kappa::Vu4, __init_71__, 0xBEEF",
    "Die Hauptstadt von Frankreich ist Paris. La capitale de l'Italie est Rome. The capital of",
    "1, 2, 4, 8, 16, 32, 64,",
    # Longer than any drafter's window (1024 tokens at most), so that the summary takes part.
    "Inventory list.\n"
    + "".join(f"Shelf {i}: {i * 37 % 101} boxes of part {i * 7919 % 1009}.\n" for i in range(70))
    + "Shelf 70:",
)

SILENT_FAILURE = (
    "the output is right, but speculation only costs time; usual causes: a drafter of another "
    "target (vocabulary, tapped layers), another RoPE base or scaling than it was trained with, "
    "or weights that were released and not restored; run `longspark check` with the server's "
    "arguments"
)


def main(argv: Sequence[str]) -> int:
    """Print the report; 0 when every check passed, 1 when not, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog="longspark verify",
        description="Checks a running server: greedy output with and without speculation, cold and "
        "warm prefixes, accept length, and that ids, log-probabilities, usage and finish reasons "
        "agree. Flushes the server's prefix cache: use a server that serves nobody else now.",
        allow_abbrev=False,
    )
    parser.add_argument("url", metavar="URL", help="http://host:port")
    parser.add_argument("--prompts", metavar="FILE", help="own prompts, one a line")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer (default 64)")
    parser.add_argument(
        "--reference",
        metavar="URL",
        help="compare with this server (same model, no speculation) instead of switching "
        "speculation off per request",
    )
    parser.add_argument(
        "--tie-gap",
        type=float,
        default=None,
        metavar="NATS",
        help="forgive a first difference between the two most probable tokens when they are no "
        "further apart than this (default: forgive none)",
    )
    parser.add_argument(
        "--min-accept-length",
        type=float,
        default=MIN_ACCEPT_LENGTH,
        metavar="TAU",
        help=f"fail below this many tokens a round (default {MIN_ACCEPT_LENGTH})",
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per answer")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    if options.tokens < MIN_TOKENS:
        parser.error(f"--tokens {options.tokens}: use at least {MIN_TOKENS}")
    try:
        prompts = read_prompts(options.prompts) if options.prompts else None
        client = ServerClient(options.url, options.timeout, options.api_key)
        reference = None
        if options.reference:
            reference = ServerClient(options.reference, options.timeout, options.api_key)
    except ValueError as error:
        parser.error(str(error))
    report = verify(
        client,
        prompts,
        options.tokens,
        reference,
        options.tie_gap,
        options.min_accept_length,
        progress=sys.stderr if sys.stderr.isatty() else None,
    )
    report.print(options.json, sys.stdout)
    return report.exit_code


def read_prompts(path: str) -> list[str]:
    """Non-empty lines of a UTF-8 file; ValueError with the reason when there are none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path}: {error}") from error
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts {path}: the file has no lines")
    return prompts


class Outcome(NamedTuple):
    """What a check found: see `report.Finding`."""

    passed: bool | None
    figure: str
    details: Sequence[str] = ()


@dataclass
class Session:
    """What the checks share: two ways to decode, and every answer seen so far.

    Attributes:
        pairs: the answers of the parity check per prompt, (with, without speculation).
        answers: every native answer; `speculated` those with speculation.
    """

    client: ServerClient
    info: dict[str, Any]
    prompts: Sequence[str]
    tokens: int
    reference: ServerClient | None = None
    reference_speculates: bool = False
    tie_gap: float | None = None
    min_accept_length: float = MIN_ACCEPT_LENGTH
    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    speculated: list[Answer] = field(default_factory=list)

    def speculate(self, prompt: str | Sequence[int], **options: Any) -> Answer:
        """The answer with speculation."""
        answer = self.client.generate(prompt, self.tokens, **options)
        self.answers.append(answer)
        self.speculated.append(answer)
        return answer

    def plain(self, prompt: str | Sequence[int], **options: Any) -> Answer:
        """The answer without speculation."""
        server = self.reference or self.client
        switch_off = self.reference is None or self.reference_speculates
        answer = server.generate(prompt, self.tokens, speculate=not switch_off, **options)
        self.answers.append(answer)
        return answer

    def equal_prompts(self) -> list[tuple[str, str]]:
        """(name, prompt) where greedy output is that of plain decoding.

        Checks that compare with plain decoding use these only: a prompt that fails the parity check
        would fail them all. Raises ServerError when there is none.
        """
        equal = [
            (self.name(number), self.prompts[number])
            for number, (ours, plain) in enumerate(self.pairs)
            if ours.ids == plain.ids
        ]
        if not equal:
            raise ServerError("no prompt with equal greedy output to compare on")
        return equal

    def name(self, number: int) -> str:
        """How a report calls a prompt."""
        prompt = self.prompts[number]
        shown = prompt if len(prompt) <= 30 else prompt[:27] + "..."
        return f"prompt {number + 1} ({shown!r})"


def verify(
    client: ServerClient,
    prompts: Sequence[str] | None = None,
    tokens: int = 64,
    reference: ServerClient | None = None,
    tie_gap: float | None = None,
    min_accept_length: float = MIN_ACCEPT_LENGTH,
    progress: TextIO | None = None,
) -> Report:
    """Run every check; a check that the server answers with an error fails with its words.

    Args:
        client: the server with LONGSPARK.
        prompts: texts to continue; None takes the built-in ones that fit the server's context.
        tokens: tokens per answer.
        reference: a server of the same model to decode plainly on.
        tie_gap: nats between the two best tokens up to which a difference is forgiven, None none.
        min_accept_length: tokens a round, bonus included, that speculation must reach.
        progress: where to name each check as it begins.
    """
    report = Report()
    try:
        info = client.get("/server_info")
        other = reference.get("/server_info") if reference else {}
    except ServerError as error:
        report.add("server", Finding("server", False, str(error)))
        return report
    report.add("server", *_server(client, info))
    if not report.passed:
        return report
    session = Session(
        client,
        info,
        prompts if prompts is not None else _fitting(PROMPTS, info, tokens),
        tokens,
        reference,
        reference_speculates=_algorithm(other) == ALGORITHM,
        tie_gap=tie_gap,
        min_accept_length=min_accept_length,
    )
    checks = (
        ("output", "greedy parity", _parity),
        ("output", "greedy parity, all at once", _parity_at_once),
        ("output", "cold = warm prefix", _cold_and_warm),
        ("speed", "accept length", _accept_length),
        ("usage", "stop strings and tokens", _stops),
        ("usage", "/v1/completions, n=2", _two_choices),
        ("usage", "/v1/completions, streamed", _streamed),
        ("usage", "log-probabilities", _logprobs),
        ("usage", "counts and finish reasons", _counts),  # last: it looks at all answers
    )
    for number, (section, name, check) in enumerate(checks, 1):
        if progress:
            print(f"[{number}/{len(checks)}] {name}", file=progress, flush=True)
        try:
            passed, figure, details = check(session)
        except ServerError as error:
            passed, figure, details = False, str(error), ()
        report.add(section, Finding(name, passed, figure, _shorten(details)))
    return report


# -- the server ------------------------------------------------------------------------------------


def _algorithm(info: dict[str, Any]) -> str:
    return str(info.get("speculative_algorithm") or "none").upper()


def _server(client: ServerClient, info: dict[str, Any]) -> list[Finding]:
    algorithm = _algorithm(info)
    hint = "start it with --speculative-algorithm LONGSPARK --speculative-draft-model-path ..."
    return [
        Finding("address", None, client.url),
        Finding(
            "model",
            None,
            f"{info.get('model_path')}, dtype {info.get('dtype')}, SGLang {info.get('version')}",
        ),
        Finding(
            "speculative algorithm",
            algorithm == ALGORITHM,
            f"{algorithm}, verify width {info.get('speculative_num_draft_tokens')}",
            () if algorithm == ALGORITHM else (hint,),
        ),
    ]


def _fitting(prompts: Sequence[str], info: dict[str, Any], tokens: int) -> list[str]:
    """Prompts that fit the server's context even at one token a byte (at least the shortest)."""
    limit = info.get("max_req_input_len") or info.get("context_length")
    if not limit:
        return list(prompts)
    fitting = [text for text in prompts if len(text.encode()) + 2 * tokens <= limit]
    return fitting or [min(prompts, key=len)]


# -- output ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where two greedy answers part.

    Attributes:
        position: index of the first output token that differs.
        tie: the two tokens are the two most probable ones of both runs, within the allowed gap.
        text: the two tokens with the two best log-probabilities of each run.
    """

    position: int
    tie: bool
    text: str


def first_difference(
    one: Answer,
    other: Answer,
    names: tuple[str, str] = ("with speculation", "without"),
    tie_gap: float | None = None,
) -> Difference | None:
    """The first token in which two greedy answers differ, or None.

    Both need log-probabilities for `tie` and `text` to say anything about ties.
    """
    if one.ids == other.ids:
        return None
    position = next(i for i, (a, b) in enumerate(zip_longest(one.ids, other.ids)) if a != b)
    tokens = [a.ids[position] if position < len(a.ids) else None for a in (one, other)]
    best = [
        a.top_logprobs[position][:2] if position < len(a.top_logprobs) else [] for a in (one, other)
    ]
    text = f"token {position}: " + "; ".join(
        f"{name} {'the end' if token is None else token}, best two {_listed(two)}"
        for name, token, two in zip(names, tokens, best, strict=True)
    )
    gaps = [two[0][0] - two[1][0] for two in best if len(two) == 2]
    same_two = all({entry[1] for entry in two} == set(tokens) for two in best)
    tie = tie_gap is not None and len(gaps) == 2 and same_two and max(gaps) <= tie_gap
    return Difference(position, tie, text)


def _listed(best: Sequence[Any]) -> str:
    return ", ".join(f"{entry[1]} at {entry[0]:.5f}" for entry in best) or "unknown"


def _parity(session: Session) -> Outcome:
    """One prompt after the other, with and without speculation."""
    differences = []
    for number, prompt in enumerate(session.prompts):
        ours = session.speculate(prompt, logprobs=True, ignore_eos=True)
        plain = session.plain(prompt, logprobs=True, ignore_eos=True)
        session.pairs.append((ours, plain))
        difference = first_difference(ours, plain, tie_gap=session.tie_gap)
        if difference:
            differences.append((session.name(number), difference))
    drafts = sum(plain.accepted for _, plain in session.pairs)
    if drafts:
        return Outcome(
            False,
            f"the yardstick itself speculates: {drafts} drafts were accepted in requests with "
            'custom_params={"longspark": {"enabled": false}}',
            ("give a server without speculation with --reference",),
        )
    return _parity_outcome(session, differences, len(session.pairs))


def _parity_at_once(session: Session) -> Outcome:
    """All prompts in one batch, speculating and plain ones mixed."""
    work = [(decode, prompt) for prompt in session.prompts for decode in ("speculate", "plain")]
    with ThreadPoolExecutor(min(len(work), MAX_CONCURRENCY)) as threads:
        answers = list(
            threads.map(
                lambda job: getattr(session, job[0])(job[1], logprobs=True, ignore_eos=True), work
            )
        )
    differences, batch_matters = [], False
    for number, (_, expected) in enumerate(session.pairs):
        ours, plain = answers[2 * number], answers[2 * number + 1]
        batch_matters |= plain.ids != expected.ids
        difference = first_difference(
            ours, expected, ("with speculation", "without, alone"), session.tie_gap
        )
        if difference:
            differences.append((session.name(number), difference))
    outcome = _parity_outcome(session, differences, len(session.pairs))
    if batch_matters and not outcome.passed:
        hint = (
            "plain decoding also changes with the batch on this server: its arithmetic depends on "
            "the batch size (--enable-deterministic-inference avoids that)"
        )
        return outcome._replace(details=[hint, *outcome.details])
    return outcome


def _parity_outcome(
    session: Session, differences: Sequence[tuple[str, Difference]], total: int
) -> Outcome:
    if not total:
        return Outcome(False, "no prompt was answered both ways")
    faults = [(name, d) for name, d in differences if not d.tie]
    ties = len(differences) - len(faults)
    figure = f"{total - len(differences)} of {total} answers of {session.tokens} tokens identical"
    if ties:
        figure += f", {ties} apart at a tie within {session.tie_gap:g} nats"
    details = [f"{name}, {difference.text}" for name, difference in differences]
    if faults and session.tie_gap is None:
        details.append(
            "two best log-probabilities that are nearly equal are a tie, which 16-bit arithmetic "
            "may break either way: serve with --enable-deterministic-inference or --dtype float32, "
            "or forgive ties with --tie-gap"
        )
    return Outcome(not faults, figure, details)


def _cold_and_warm(session: Session) -> Outcome:
    """The same answers from an empty and from a filled prefix cache, and as good drafts."""
    if session.info.get("disable_radix_cache"):
        return Outcome(None, "the server runs without a prefix cache (--disable-radix-cache)")
    faults, pairs, ties = [], [], 0
    for number, prompt in enumerate(session.prompts):
        session.client.flush()
        cold = session.speculate(prompt, logprobs=True, ignore_eos=True)
        warm = session.speculate(prompt, logprobs=True, ignore_eos=True)
        # Shares the prompt and a part of the answer, so that the hit ends inside the new prompt.
        longer = cold.prompt_ids + cold.ids[: len(cold.ids) // 2] + cold.prompt_ids[-8:]
        longer_warm = session.speculate(longer, logprobs=True, ignore_eos=True)
        session.client.flush()
        longer_cold = session.speculate(longer, logprobs=True, ignore_eos=True)
        for title, first, second in (
            ("again", cold, warm),
            ("with a suffix", longer_cold, longer_warm),
        ):
            pairs.append((first, second))
            if first.meta.get("cached_tokens"):
                faults.append(f"{session.name(number)} {title}: /flush_cache left the cache filled")
            difference = first_difference(first, second, ("cold", "warm"), session.tie_gap)
            if difference:
                ties += difference.tie
            if difference and not difference.tie:
                faults.append(
                    f"{session.name(number)} {title}, {second.meta.get('cached_tokens')} tokens "
                    f"from the cache: {difference.text}"
                )
    cached = sum(int(warm.meta.get("cached_tokens") or 0) for _, warm in pairs)
    before, after = (accept_length(side) for side in zip(*pairs, strict=True))
    if not cached:
        faults.append("no prompt token came from the cache, so nothing was compared")
    # Equal output in fewer rounds or more: the accepted drafts make the whole difference.
    drafts, warm_drafts = (sum(a.accepted for a in side) for side in zip(*pairs, strict=True))
    if warm_drafts < WARM_SHARE * drafts - 3 * math.sqrt(drafts):
        faults.append(
            f"accept length falls from {before:.2f} cold to {after:.2f} warm: the drafter does not "
            "see the cached part of the prompt"
        )
    figure = (
        f"{len(pairs)} pairs, {cached} tokens from the cache; accept length {before:.2f} cold, "
        f"{after:.2f} warm"
    )
    if ties:
        figure += f"; {ties} apart at a tie within {session.tie_gap:g} nats"
    return Outcome(not faults, figure, faults)


# -- speed -----------------------------------------------------------------------------------------


def accept_length(answers: Sequence[Answer]) -> float:
    """Tokens per round, bonus included (1.0: no draft accepted); 1.0 where no round was run."""
    rounds = sum(answer.rounds for answer in answers)
    return 1.0 + sum(answer.accepted for answer in answers) / rounds if rounds else 1.0


def _accept_length(session: Session) -> Outcome:
    rounds = sum(answer.rounds for answer in session.speculated)
    if not rounds:
        return Outcome(False, "the answers carry no spec_verify_ct: nothing was speculated")
    length = accept_length(session.speculated)
    figure = f"{length:.2f} over {rounds} rounds"
    if length >= session.min_accept_length:
        return Outcome(True, figure)
    wanted = f"at least {session.min_accept_length:g} are wanted"
    return Outcome(False, figure, (f"{wanted}: {SILENT_FAILURE}",))


# -- usage -----------------------------------------------------------------------------------------


def _stops(session: Session) -> Outcome:
    """Stop strings and stop tokens at many places of a block, against plain decoding."""
    faults: list[str] = []
    tried = 0
    for name, prompt in session.equal_prompts():
        whole = session.plain(prompt, ignore_eos=True)
        stops: list[dict[str, Any]] = [{"stop": [piece]} for piece in stop_strings(whole.text)]
        stops += [{"stop_token_ids": [token]} for token in stop_tokens(whole.ids)]
        tried += len(stops)
        for stop in stops:
            ours, plain = session.speculate(prompt, **stop), session.plain(prompt, **stop)
            ((kind, (value,)),) = stop.items()
            label = f"{name}, {kind} {value!r}"
            faults += [
                f"{label}: {what} {_tail(mine)}, without speculation {_tail(theirs)}"
                for what, mine, theirs in (
                    ("ids", ours.ids, plain.ids),
                    ("text", ours.text, plain.text),
                    ("finish reason", _finish(ours), _finish(plain)),
                )
                if mine != theirs
            ]
            if _finish(ours).get("type") != "stop":
                faults.append(f"{label}: not stopped, finish reason {_finish(ours)}")
            elif kind == "stop" and value in ours.text:
                faults.append(f"{label}: the text runs past the stop string")
    if not tried:
        return Outcome(False, "no answer holds text to stop at; give other --prompts")
    return Outcome(not faults, f"{tried} stops inside the output", faults)


def stop_strings(text: str) -> list[str]:
    """A few short pieces of a text, each found first where it was taken from.

    Pieces of three characters, which cross token borders as often as not.
    """
    pieces: list[str] = []
    for part in range(1, STOPS_PER_PROMPT + 1):
        for start in range(part * len(text) // (STOPS_PER_PROMPT + 1), len(text) - 2):
            piece = text[start : start + 3]
            # U+FFFD stands for half a character: its bytes may yet become another one.
            clean = piece.isprintable() and piece.strip() == piece and "\ufffd" not in piece
            if clean and piece not in pieces and text.find(piece) == start:
                pieces.append(piece)
                break
    return pieces


def stop_tokens(ids: Sequence[int]) -> list[int]:
    """One token that appears first near the middle of the output, if there is any."""
    for position in range(len(ids) // 2, len(ids)):
        if ids[position] not in ids[:position]:
            return [ids[position]]
    return []


def _finish(answer: Answer) -> dict[str, Any]:
    return answer.meta.get("finish_reason") or {}


def _tail(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} long, ending {value[-4:]}"
    return f"...{value[-30:]!r}" if isinstance(value, str) else str(value)


def _completion_body(session: Session, prompt: str) -> dict[str, Any]:
    # Any model name is served: SGLang has one model.
    return {"model": "default", "prompt": prompt, "max_tokens": session.tokens, "temperature": 0}


def _two_choices(session: Session) -> Outcome:
    """n=2 at temperature 0: two equal choices, and usage that counts both."""
    faults = []
    prompts = session.equal_prompts()
    for name, prompt in prompts:
        plain = session.plain(prompt)
        body = {**_completion_body(session, prompt), "n": 2, "logprobs": 1}
        answer = session.client.post("/v1/completions", body)
        choices = answer.get("choices") or []
        indices = sorted(choice.get("index", -1) for choice in choices)
        lengths = [len((choice.get("logprobs") or {}).get("tokens") or []) for choice in choices]
        usage = answer.get("usage") or {}
        faults += [
            f"{name}: {what} {found}, not {wanted}"
            for what, found, wanted in (
                ("choices", indices, [0, 1]),
                ("log-probabilities", lengths, [len(plain.ids)] * 2),
                ("prompt_tokens", usage.get("prompt_tokens"), len(plain.prompt_ids)),
                ("completion_tokens", usage.get("completion_tokens"), 2 * len(plain.ids)),
                (
                    "finish reasons",
                    [choice.get("finish_reason") for choice in choices],
                    [_finish(plain).get("type")] * 2,
                ),
            )
            if found != wanted
        ]
        faults += [
            f"{name}: choice {choice.get('index')} has another text than plain decoding"
            for choice in choices
            if choice.get("text") != plain.text
        ]
    return Outcome(not faults, f"{len(prompts)} prompts", faults)


def _streamed(session: Session) -> Outcome:
    """Chunks add up to the plain answer, and the last one carries the usage."""
    faults = []
    prompts = session.equal_prompts()
    for name, prompt in prompts:
        plain = session.plain(prompt)
        body = {**_completion_body(session, prompt), "stream": True}
        body["stream_options"] = {"include_usage": True}
        text, reason = "", None
        usage: dict[str, Any] = {}
        for event in session.client.events("/v1/completions", body):
            if "error" in event:
                raise ServerError(f"/v1/completions streamed an error: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or []:
                text += choice.get("text") or ""
                reason = choice.get("finish_reason") or reason
        faults += [
            f"{name}: {what} {_tail(found)}, not {_tail(wanted)}"
            for what, found, wanted in (
                ("text", text, plain.text),
                ("finish reason", reason, _finish(plain).get("type")),
                ("prompt_tokens", usage.get("prompt_tokens"), len(plain.prompt_ids)),
                ("completion_tokens", usage.get("completion_tokens"), len(plain.ids)),
            )
            if found != wanted
        ]
    return Outcome(not faults, f"{len(prompts)} prompts", faults)


def _logprobs(session: Session) -> Outcome:
    """Each output token has its own log-probability: its id, the best one, and the plain value."""
    faults, distances = [], []
    for number, (ours, plain) in enumerate(session.pairs):
        if not len(ours.ids) == len(ours.logprobs) == len(ours.top_logprobs):
            faults.append(
                f"{session.name(number)}: {len(ours.logprobs)} log-probabilities and "
                f"{len(ours.top_logprobs)} lists of best tokens for {len(ours.ids)} tokens"
            )
            continue
        for position, token in enumerate(ours.ids):
            value, its_id = ours.logprobs[position][:2]
            best = ours.top_logprobs[position][0][0]
            if its_id != token or value < best:
                faults.append(
                    f"{session.name(number)}, token {position} is {token}: log-probability of "
                    f"{its_id} is {value:.5f}, the best {best:.5f}"
                )
                break
        difference = first_difference(ours, plain)
        same = difference.position if difference else len(ours.ids)
        distances += [
            abs(mine[0] - theirs[0])
            for mine, theirs in zip(ours.logprobs[:same], plain.logprobs[:same], strict=False)
        ]
    if not distances:
        faults.append("there is nothing to compare: no log-probability came with the answers")
    mean = sum(distances) / max(1, len(distances))
    if mean > LOGPROB_TOLERANCE:
        faults.append(f"they are off plain decoding's by more than {LOGPROB_TOLERANCE} on average")
    figure = f"{len(distances)} tokens, mean distance to plain decoding {mean:.2g} nats"
    return Outcome(not faults, figure, faults)


def _counts(session: Session) -> Outcome:
    """Every native answer so far: usage says what the ids say."""
    faults = [fault for answer in session.answers for fault in count_faults(answer)]
    tokens = sum(len(answer.ids) for answer in session.answers)
    return Outcome(
        bool(session.answers) and not faults,
        f"{len(session.answers)} answers, {tokens} tokens",
        faults,
    )


def count_faults(answer: Answer) -> list[str]:
    """What does not add up in one native answer."""
    meta, length = answer.meta, len(answer.ids)
    kind = _finish(answer).get("type")
    faults = [
        f"{what} {found} of an answer with {wanted}"
        for what, found, wanted, same in (
            (
                "completion_tokens",
                meta.get("completion_tokens"),
                f"{length} ids",
                meta.get("completion_tokens") == length,
            ),
            (
                "prompt_tokens",
                meta.get("prompt_tokens"),
                f"{len(answer.prompt_ids)} prompt ids",
                meta.get("prompt_tokens") == len(answer.prompt_ids),
            ),
        )
        if not same
    ]
    if length > answer.asked:
        faults.append(f"{length} ids where {answer.asked} were asked for")
    if kind == "length" and length != answer.asked:
        faults.append(f"finish reason 'length' after {length} of {answer.asked} tokens")
    if kind not in ("length", "stop"):
        faults.append(f"finish reason {kind!r}")
    return faults


def _shorten(details: Sequence[str]) -> Sequence[str]:
    """The first details and the number of the others."""
    details = list(dict.fromkeys(details))
    if len(details) <= SHOWN:
        return details
    return [*details[:SHOWN], f"and {len(details) - SHOWN} more"]
