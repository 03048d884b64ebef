"""All settings of one training run; saved as training.json beside the weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspark_sglang.config import ConfigError, LongSparkError, read_json_object

DEFAULT_LOSS = "0.1*ce+0.9*l1"
DEFAULT_GAMMA = 4.0
# What an ablation can take away from the drafter.
VIEWS = ("window", "summary", "boundary", "markov")

TRAINING_FILE = "training.json"
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant")


class TrainingError(LongSparkError):
    """Training or evaluation cannot run as asked; each reason names the setting and the fix."""


def check_views(without: Collection[str]) -> None:
    """TrainingError for a name that is none of `VIEWS`."""
    unknown = sorted(set(without) - set(VIEWS))
    if unknown:
        raise TrainingError(
            "no such view",
            [f"--without {name}: use one of {', '.join(VIEWS)}" for name in unknown],
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of `longspark train`. ConfigError lists all that cannot be used.

    Attributes:
        steps: optimiser steps in total; the schedule spans them.
        sequences_per_step: source sequences per step, over all processes.
        anchors_per_sequence: drawn anew whenever a sequence is visited.
        anchors_per_group: anchors that go through the drafter at once; with ``checkpointing`` the
            activations of one group at a time are kept, at the price of a second forward pass.
        loss, gamma: mixture and position decay, see losses.py.
        learning_rate: peak; of AdamW, or of Muon for matrices while AdamW gets a tenth.
        warmup: share of the steps; floor: last learning rate as a share of the peak.
        clip: largest gradient norm.
        autocast: run the drafter's matrix products in bfloat16 (weights stay float32).
        train_vocabulary: the softmaxes of the losses run over the answers' most frequent tokens
            only, this many; 0 = the whole vocabulary. Slots with another label do not count. The
            exported drafter has all tokens either way.
        without: views taken away, for ablations.
    """

    steps: int = 1000
    sequences_per_step: int = 8
    anchors_per_sequence: int = 64
    anchors_per_group: int = 32
    loss: str = DEFAULT_LOSS
    gamma: float = DEFAULT_GAMMA
    optimizer: str = "adamw"
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    schedule: str = "cosine"
    warmup: float = 0.04
    floor: float = 0.0
    clip: float = 1.0
    autocast: bool = False
    checkpointing: bool = True
    train_vocabulary: int = 0
    seed: int = 0
    without: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # target, data, versions: for the record

    def __post_init__(self) -> None:
        # Imported here: the losses need torch, and `longspark train --help` does not.
        from longspark_sglang.training.losses import parse_mixture

        reasons = []
        for name in (
            "steps",
            "sequences_per_step",
            "anchors_per_sequence",
            "anchors_per_group",
            "gamma",
            "learning_rate",
            "clip",
        ):
            if not getattr(self, name) > 0:
                reasons.append(f"{name} is {getattr(self, name)}: it must be positive")
        if self.train_vocabulary < 0:
            reasons.append(f"train_vocabulary is {self.train_vocabulary}: it must be 0 or more")
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                reasons.append(f"{name} is {getattr(self, name)}: it must lie in 0..1")
        if self.optimizer not in OPTIMIZERS:
            reasons.append(f"optimizer is {self.optimizer!r}: use {' or '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            reasons.append(f"schedule is {self.schedule!r}: use {' or '.join(SCHEDULES)}")
        for check in (lambda: parse_mixture(self.loss), lambda: check_views(self.without)):
            try:
                check()
            except LongSparkError as error:
                reasons += error.reasons
        if reasons:
            raise ConfigError("this training cannot be run", reasons)

    def rate(self, step: int) -> float:
        """Share of the peak learning rate at a step, 0 <= step < steps."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return (step + 1) / warm
        if self.schedule == "constant":
            return 1.0
        gone = (step - warm) / max(self.steps - warm, 1)
        left = 1 - gone if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * gone))
        return self.floor + (1 - self.floor) * left

    def save(self, folder: Path) -> None:
        """Write training.json into a folder."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)
        (folder / TRAINING_FILE).write_text(text + "\n")

    @classmethod
    def load(cls, folder: Path) -> TrainingConfig:
        """Read training.json. ConfigError for an unreadable file or unknown keys."""
        try:
            content = read_json_object(folder / TRAINING_FILE)
        except ValueError as error:
            raise ConfigError(f"{folder} holds no training", [str(error)]) from None
        unknown = sorted(content.keys() - {item.name for item in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(
                f"{folder / TRAINING_FILE} cannot be used", [f"unknown key {k!r}" for k in unknown]
            )
        content["without"] = tuple(content.get("without", ()))
        return cls(**content)
