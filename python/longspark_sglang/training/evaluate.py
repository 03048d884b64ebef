"""`longspark eval`: accept length of a drafter, offline, by the law of serving.

The answers of the data are replayed. Given that token x was emitted where the target has
probability p(x) and the drafter q(x), speculative sampling took it from an accepted draft with
probability min(p, q)(x) / p(x) = min(1, q(x) / p(x)); at temperature 0 that is 1 if x is the
drafter's argmax, else 0. So the rounds in which serving would have emitted the same answer form a
Markov chain over its positions, and its expectations are summed here exactly, without drawing.

This holds for answers drawn at the temperature in question; at another one the figures describe
acceptance along these answers, and the table says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspark_sglang.drafter import LongSparkDrafter, TargetParts
from longspark_sglang.drafter.parts import wide_dtype
from longspark_sglang.training.anchors import labels_of, possible_anchors
from longspark_sglang.training.config import TrainingError, check_views
from longspark_sglang.training.data import PackedData, PackedSequence
from longspark_sglang.training.features import Features
from longspark_sglang.training.forward import (
    SequenceViews,
    corrected_logits,
    hidden_at,
    prefix_summaries,
    target_logits_at,
)

_BOOTSTRAPS = 1000


@dataclass(frozen=True)
class Replay:
    """Expected rounds of one answer.

    Attributes:
        tokens: emitted after the first one.
        rounds: expected number.
        reached, accepted: per slot [K] float64, expected rounds whose drafts before the slot were
            all accepted, and those in which its own was too. Slots beyond the answer's end do not
            count.
    """

    tokens: int
    rounds: float
    reached: torch.Tensor
    accepted: torch.Tensor


@torch.no_grad()
def accept_chances(
    drafter: LongSparkDrafter,
    views: SequenceViews,
    sequence: PackedSequence,
    target: TargetParts,
    temperature: float,
    without: Collection[str] = (),
    group: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chance that each slot's draft is accepted, given that all before it were.

    Returns anchors [A] int64 (every possible one, ascending) and chances [A, K] float64; 0 where
    the answer has no token for the slot, and after a slot that is never accepted.
    """
    device = views.hidden.device
    ids, response = sequence.ids.to(device), sequence.response.to(device)
    slots = drafter.config.num_draft_tokens
    anchors = possible_anchors(response)
    chances = [torch.zeros(0, slots, dtype=torch.float64)]
    limit = target.vocab_limit or drafter.config.vocab_size
    for some in anchors.split(group):
        labels, prev, valid = labels_of(ids, response, some, slots)
        # Anchors of a group are neighbours: each group starts its scan anew, so that the memory
        # does not grow with their number.
        summary = prefix_summaries(drafter.summary_queries, views.key, views.value, some)
        hidden = hidden_at(drafter, views, ids, some, summary, target, without)
        chance = torch.zeros(len(some), slots, dtype=torch.float64)
        # Slot by slot, because the head is most of the work and few late slots are reached.
        live = valid[:, 0].nonzero().flatten()
        for slot in range(slots):
            base = drafter.base_logits(hidden[live, slot], target)
            logits = corrected_logits(drafter, base, prev[live, slot], without)[:, :limit]
            label = labels[live, slot]
            if temperature == 0:
                accepted = (logits.argmax(-1) == label).double()
            else:
                wanted = target_logits_at(views, some[live] + slot, 1, target)[:, 0, :limit]
                log_q, log_p = (_log_chance(x, label, temperature) for x in (logits, wanted))
                accepted = (log_q - log_p).clamp(max=0).exp().double()
            chance[live.cpu(), slot] = accepted.cpu()
            if slot + 1 < slots:
                live = live[(accepted > 0) & valid[live, slot + 1]]
            if len(live) == 0:
                break
        chances.append(chance)
    return anchors.cpu(), torch.cat(chances)


def _log_chance(logits: torch.Tensor, label: torch.Tensor, temperature: float) -> torch.Tensor:
    """ln softmax(logits / T) at one label per row."""
    scaled = logits.to(wide_dtype(logits)) / temperature
    return scaled.gather(-1, label[:, None])[:, 0] - scaled.logsumexp(-1)


def replay(anchors: torch.Tensor, chances: torch.Tensor, last: int) -> Replay:
    """Expected rounds from the first anchor to the last token's position ``last``.

    Args:
        anchors: [A] int64, all consecutive positions from the first anchor to last - 1.
        chances: [A, K], of `accept_chances`.
    """
    count, slots = chances.shape
    reached, accepted = torch.zeros(2, slots, dtype=torch.float64)
    if count == 0:
        return Replay(0, 0.0, reached, accepted)
    first = int(anchors[0])
    starts = torch.zeros(count + slots + 1, dtype=torch.float64)  # expected rounds begun there
    starts[0] = 1.0
    for i in range(count):
        left = min(slots, count - i)
        run = torch.cat((torch.ones(1, dtype=torch.float64), chances[i, :left].cumprod(0)))
        reached[:left] += starts[i] * run[:-1]
        accepted[:left] += starts[i] * run[1:]
        # Exactly n accepted: the next round begins n + 1 positions on.
        exactly = run - torch.cat((run[1:], torch.zeros(1, dtype=torch.float64)))
        starts[i + 1 : i + 2 + left] += starts[i] * exactly
    return Replay(last - first, float(starts[:count].sum()), reached, accepted)


@dataclass(frozen=True)
class Summary:
    """Figures over many answers: accept length (bonus included), its 95% interval, slots."""

    accept_length: float
    low: float
    high: float
    per_slot: list[float]
    sequences: int
    rounds: float

    @classmethod
    def of(cls, replays: Sequence[Replay]) -> Summary:
        """Pool the rounds of all answers; the interval is a bootstrap over answers (seed 0)."""
        used = [r for r in replays if r.rounds > 0]
        if not used:
            raise TrainingError("nothing to evaluate", ["no answer has two tokens or more"])
        tokens = torch.tensor([float(r.tokens) for r in used], dtype=torch.float64)
        rounds = torch.tensor([r.rounds for r in used], dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(used), (_BOOTSTRAPS, len(used)), generator=generator)
        lengths = (tokens[drawn].sum(1) / rounds[drawn].sum(1)).sort().values
        reached = torch.stack([r.reached for r in used]).sum(0)
        accepted = torch.stack([r.accepted for r in used]).sum(0)
        return cls(
            accept_length=float(tokens.sum() / rounds.sum()),
            low=float(lengths[int(0.025 * _BOOTSTRAPS)]),
            high=float(lengths[int(0.975 * _BOOTSTRAPS) - 1]),
            per_slot=(accepted / reached.clamp(min=1e-12)).tolist(),
            sequences=len(used),
            rounds=float(rounds.sum()),
        )


def evaluate(
    drafter: LongSparkDrafter,
    features: Features,
    sequences: Sequence[PackedSequence],
    target: TargetParts,
    temperature: float,
    without: Collection[str] = (),
) -> Summary:
    """Replay the answers of ``sequences``."""
    replays = []
    for sequence in sequences:
        views = features.of(sequence.ids)
        chances = accept_chances(drafter, views, sequence, target, temperature, without)
        replays.append(replay(*chances, last=len(sequence.ids) - 1))
    return Summary.of(replays)


def load_target(name: str, dtype: str | None, device: str | None) -> Any:
    """A transformers model by folder or hub id, frozen.

    By default on the GPU in bfloat16, without one on the CPU in float32. TrainingError if there is
    no such model.
    """
    from transformers import AutoModelForCausalLM

    cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    device = device or ("cuda" if cuda else "cpu")
    dtype = dtype or ("bfloat16" if cuda else "float32")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"no target at {name!r}",
            [f"{error}: give a folder or hub id that transformers loads as a causal model"],
        ) from error
    return model.to(device).eval().requires_grad_(False)


def run(options: argparse.Namespace) -> int:
    """`longspark eval`: print the table; returns the exit code."""
    check_views(options.without)

    data = {folder: PackedData.load(folder) for folder in options.data}
    model = load_target(options.target, options.dtype, options.device)
    drafter = LongSparkDrafter.from_pretrained(options.draft, dtype=model.dtype).to(model.device)
    target = TargetParts.from_hf(model)
    features = Features(model, drafter.config)
    table = []
    print(f"{'data':<20} {'without':<9} {'T':>4} {'answers':>7} {'tau':>6}  95%          per slot")
    for folder, packed in data.items():
        sequences = packed.sequences[options.split][: options.limit]
        for temperature in options.temperature:
            drawn_at = packed.temperatures
            exact = drawn_at == [temperature]
            for ablated in ([], *([name] for name in options.without)):
                found = evaluate(drafter, features, sequences, target, temperature, ablated)
                row = {"data": folder, "without": ablated, "temperature": temperature}
                table.append({**row, "law_of_serving": exact, **vars(found)})
                slots = " ".join(f"{share:.2f}" for share in found.per_slot)
                print(
                    f"{Path(folder).name:<20} {','.join(ablated) or '-':<9} {temperature:>4g} "
                    f"{found.sequences:>7} {found.accept_length:>6.3f}  "
                    f"{found.low:.3f}..{found.high:.3f} {slots}"
                    + ("" if exact else f"  (answers drawn at T = {drawn_at})"),
                    flush=True,
                )
    if options.json:
        Path(options.json).write_text(json.dumps(table, indent=2) + "\n")
    if options.chart:
        draw_chart(table, Path(options.chart))
    return 0


def draw_chart(table: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of accept length with their intervals: one group per data set, one colour per variant.

    TrainingError without matplotlib or for a kind of file that it cannot write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainingError(
            "no chart", [f"{error}: pip install matplotlib, or drop --chart"]
        ) from error
    groups = list(dict.fromkeys(Path(row["data"]).name for row in table))
    bars: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        without = f", without {row['without'][0]}" if row["without"] else ""
        bars.setdefault(f"T = {row['temperature']:g}{without}", []).append(row)
    figure = Figure(figsize=(3 + 1.5 * len(groups), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(bars)
    for i, (label, rows) in enumerate(bars.items()):
        at = [groups.index(Path(row["data"]).name) - 0.4 + (i + 0.5) * width for row in rows]
        tau = [row["accept_length"] for row in rows]
        low = [row["accept_length"] - row["low"] for row in rows]
        high = [row["high"] - row["accept_length"] for row in rows]
        axes.bar(at, tau, width, yerr=[low, high], capsize=3, label=label)
    axes.set_xticks(range(len(groups)), groups)
    axes.axhline(1, color="black", linewidth=0.5)  # what decoding without drafts would have
    axes.set_ylabel("accept length (bonus included), 95% interval")
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise TrainingError(f"no chart in {path}", [f"{error}: name a .png or .svg"]) from error
