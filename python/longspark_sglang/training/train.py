"""`longspark train`: a drafter for a frozen target.

A step visits some source sequences; each gives many anchors, drawn anew. Everything random is a
function of (seed, step, place in the step), so a resumed run needs the weights, the optimiser's
state and the step number to continue bit for bit.

Under `torchrun` every process takes its share of each step's sequences and the gradients are
summed. By hand: the drafter is called part by part, which DistributedDataParallel cannot wrap.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as recompute

from longspark_sglang import __version__, checkpoint
from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter import LongSparkDrafter, TargetParts
from longspark_sglang.training.anchors import choose_anchors, labels_of
from longspark_sglang.training.config import TrainingConfig, TrainingError
from longspark_sglang.training.data import PackedData, PackedSequence
from longspark_sglang.training.evaluate import evaluate, load_target
from longspark_sglang.training.features import Features
from longspark_sglang.training.forward import (
    SequenceViews,
    base_logits_at,
    corrected_logits,
    distinct_target_logits_at,
    prefix_summaries,
)
from longspark_sglang.training.losses import parse_mixture, slot_losses, slot_weights
from longspark_sglang.training.report import TrainingReport
from longspark_sglang.training.vocabulary import TrainVocabulary

STATE_FILE = "state.pt"
CURVE_FILE = "curve.jsonl"


def sequence_loss(
    drafter: LongSparkDrafter,
    views: SequenceViews,
    sequence: PackedSequence,
    anchors: torch.Tensor,
    target: TargetParts,
    config: TrainingConfig,
    vocabulary: TrainVocabulary | None = None,
) -> torch.Tensor:
    """The mean loss over the valid slots of all anchors, weighted by slot; 0 without anchors.

    With a ``vocabulary`` the ``target`` must be `TrainVocabulary.parts`.
    """
    device = views.hidden.device
    ids, response = sequence.ids.to(device), sequence.response.to(device)
    slots = drafter.config.num_draft_tokens
    anchors = anchors.to(device)
    labels, prev, valid = labels_of(ids, response, anchors, slots)
    tokens = None
    if vocabulary is not None:
        tokens, labels = vocabulary.tokens, vocabulary.place[labels]
        valid = valid & (labels >= 0)
        labels = labels.clamp(min=0)
    weights = slot_weights(slots, config.gamma, device) * valid
    mixture = parse_mixture(config.loss)
    summary = prefix_summaries(drafter.summary_queries, views.key, views.value, anchors)

    def group_loss(summary: torch.Tensor, group: slice) -> torch.Tensor:
        some = anchors[group]
        with torch.autocast(device.type, torch.bfloat16, enabled=config.autocast):
            base = base_logits_at(drafter, views, ids, some, summary, target, config.without)
            logits = corrected_logits(drafter, base, prev[group], config.without, tokens)
            wanted, rows = distinct_target_logits_at(views, some, slots, target)
        losses = slot_losses(mixture, logits, wanted, labels[group], rows)
        return (losses * weights[group]).sum()

    total = summary.new_zeros(())
    for begin in range(0, len(anchors), config.anchors_per_group):
        group = slice(begin, begin + config.anchors_per_group)
        if config.checkpointing:
            part = recompute(group_loss, summary[group], group, use_reentrant=False)
        else:
            part = group_loss(summary[group], group)
        total = total + part
    return total / weights.sum().clamp(min=1e-6)


def epoch_order(
    sequences: Sequence[PackedSequence], per_step: int, seed: int, epoch: int
) -> list[list[int]]:
    """Indices of each step of an epoch, in random order.

    The sequences of a step are of one length bucket as far as possible, so that processes that
    share a step finish together. The last few that fill no step are left out, others each epoch.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    buckets: dict[int, list[int]] = {}
    for index in torch.randperm(len(sequences), generator=generator).tolist():
        buckets.setdefault(sequences[index].bucket, []).append(index)
    steps, rest = [], []
    for _, members in sorted(buckets.items()):
        full = len(members) // per_step * per_step
        steps += [members[i : i + per_step] for i in range(0, full, per_step)]
        rest += members[full:]
    steps += [rest[i : i + per_step] for i in range(0, len(rest) // per_step * per_step, per_step)]
    return [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]


def make_optimizers(
    drafter: LongSparkDrafter, config: TrainingConfig
) -> list[torch.optim.Optimizer]:
    """AdamW on everything; or Muon on the matrices between hidden states and AdamW on the rest."""
    tables = ("position_embedding", "markov_w1", "markov_w2")
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            is_map = parameter.dim() == 2 and not any(table in name for table in tables)
            (matrices if is_map else others).append(parameter)
    rate, decay = config.learning_rate, config.weight_decay
    adam: dict[str, Any] = dict(betas=(0.9, 0.95), weight_decay=decay)
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(matrices + others, lr=rate, **adam)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay),
        torch.optim.AdamW(others, lr=rate / 10, **adam),
    ]


@dataclass(frozen=True)
class Crew:
    """The processes that share a training."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: str | None) -> Crew:
        """As torchrun's environment says; alone without it."""
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size == 1:
            return cls()
        cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
        return cls(dist.get_rank(), size)

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace every tensor by its sum over the processes, in one message."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))


class Trainer:
    """One training run; `run` takes it from its present step to another."""

    def __init__(
        self,
        drafter: LongSparkDrafter,
        features: Features,
        target: TargetParts,
        data: PackedData,
        config: TrainingConfig,
        output: Path,
        crew: Crew,
    ) -> None:
        train = data.sequences["train"]
        reasons = []
        if config.sequences_per_step % crew.size:
            reasons.append(
                f"sequences_per_step {config.sequences_per_step} does not divide among "
                f"{crew.size} processes"
            )
        if len(train) < config.sequences_per_step:
            reasons.append(
                f"the data hold {len(train)} training sequences, a step takes "
                f"{config.sequences_per_step}: lower --sequences-per-step or add data"
            )
        if reasons:
            raise TrainingError("this training cannot be run", reasons)
        self.drafter, self.features, self.target = drafter, features, target
        self.train, self.held_out = train, data.sequences["held_out"]
        self.config, self.output, self.crew = config, output, crew
        self.optimizers = make_optimizers(drafter, config)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.vocabulary = None
        self._loss_target = target
        if config.train_vocabulary:
            self.vocabulary = TrainVocabulary.most_frequent(
                self.train, config.train_vocabulary, drafter.config.vocab_size
            ).to(target.lm_head.device)
            self._loss_target = self.vocabulary.parts(target)
        self.step = 0
        self._epoch, self._order = 0, self._order_of(0)

    def _order_of(self, epoch: int) -> list[list[int]]:
        return epoch_order(self.train, self.config.sequences_per_step, self.config.seed, epoch)

    def _sequences(self, step: int) -> list[PackedSequence]:
        # Every epoch has as many steps; only their contents differ.
        epoch, place = divmod(step, len(self._order))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return [self.train[i] for i in self._order[place]]

    def one_step(self) -> tuple[float, int]:
        """One optimiser step; returns the mean loss and the source tokens, over all processes."""
        config, crew = self.config, self.crew
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * config.rate(self.step)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        loss, tokens = 0.0, 0
        for place, sequence in enumerate(self._sequences(self.step)):
            if place % crew.size != crew.rank:
                continue
            seed = (config.seed * 1_000_003 + self.step) * config.sequences_per_step + place
            anchors = choose_anchors(
                sequence.response, config.anchors_per_sequence, torch.Generator().manual_seed(seed)
            )
            tokens += len(sequence.ids)
            if len(anchors) == 0:
                continue
            part = sequence_loss(
                self.drafter,
                self.features.of(sequence.ids),
                sequence,
                anchors,
                self._loss_target,
                config,
                self.vocabulary,
            )
            part = part / config.sequences_per_step
            part.backward()
            loss += float(part.detach())
        device = self.parameters[0].device
        counts = torch.tensor([loss, tokens], dtype=torch.float64, device=device)
        crew.add_up([counts])
        crew.add_up([p.grad for p in self.parameters if p.grad is not None])
        if not torch.isfinite(counts[0]):
            raise TrainingError(
                f"the loss is {counts[0].item()} at step {self.step}",
                ["lower --learning-rate, or resume from the last saved state"],
            )
        torch.nn.utils.clip_grad_norm_(self.parameters, config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return counts[0].item(), int(counts[1])

    def run(
        self,
        until: int,
        *,
        eval_every: int,
        eval_sequences: int,
        save_every: int,
        line_every: int,
        tensorboard: Path | None = None,
    ) -> None:
        """Train up to step ``until``; evaluates, reports and saves on the way and at the end."""
        first = self.crew.rank == 0
        report = TrainingReport(until, self.step, line_every, tensorboard if first else None)
        try:
            while self.step < until:
                loss, tokens = self.one_step()
                if not first:
                    continue
                last = self.step == until
                record: dict[str, Any] = {"step": self.step, "loss": loss}
                if self.held_out and (last or self.step % eval_every == 0):
                    watched = self.held_out[:eval_sequences]
                    found = evaluate(
                        self.drafter, self.features, watched, self.target, 0.0, self.config.without
                    )
                    record |= {"accept_length": found.accept_length, "per_slot": found.per_slot}
                with (self.output / CURVE_FILE).open("a") as file:
                    file.write(json.dumps(record) + "\n")
                report.step(record, tokens)
                if last or self.step % save_every == 0:
                    self.save()
        finally:
            report.close()

    def save(self) -> None:
        """The drafter (released format, bfloat16), training.json, and the state to resume from."""
        checkpoint.save(self.drafter, self.drafter.config, self.output)
        self.config.save(self.output)
        state = {
            "step": self.step,
            "drafter": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        unfinished = self.output / f".{STATE_FILE}"
        torch.save(state, unfinished)
        unfinished.replace(self.output / STATE_FILE)

    def resume(self) -> None:
        """Continue where `save` was called last. TrainingError if the settings differ."""
        if not (self.output / STATE_FILE).is_file():
            raise TrainingError(f"{self.output} cannot be resumed", [f"it has no {STATE_FILE}"])
        before = dataclasses.asdict(TrainingConfig.load(self.output))
        now = dataclasses.asdict(self.config)
        before |= before.pop("facts")
        now |= now.pop("facts")
        reasons = [
            f"{key} was {before.get(key)!r} and is now {value!r}"
            for key, value in now.items()
            if before.get(key) != value
        ]
        shape = LongSparkConfig.from_pretrained(self.output).to_dict()
        reasons += [
            f"the drafter's {key} was {shape.get(key)!r} and is now {value!r}"
            for key, value in self.drafter.config.to_dict().items()
            if shape.get(key) != value
        ]
        if reasons:
            raise TrainingError(f"{self.output} was trained with other settings", reasons)
        state = torch.load(self.output / STATE_FILE, weights_only=True, map_location="cpu")
        self.drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self._cut_curve()

    def _cut_curve(self) -> None:
        """Drop the lines of steps that were made after the last save and will be made again."""
        curve = self.output / CURVE_FILE
        if self.crew.rank == 0 and curve.exists():
            lines = [ln for ln in curve.read_text().splitlines() if ln.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= self.step]
            curve.write_text("".join(line + "\n" for line in kept))


def run(options: argparse.Namespace) -> int:
    """`longspark train`; returns the exit code."""
    crew = Crew.join(options.device)
    try:
        # Processes other than the first say nothing, except errors.
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(sys.stdout if crew.rank == 0 else nowhere),
        ):
            return _train(options, crew)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(options: argparse.Namespace, crew: Crew) -> int:
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    if not options.resume and (output / STATE_FILE).exists():
        raise TrainingError(
            f"{output} holds a training already", ["add --resume, or use another --output"]
        )
    data = PackedData.load(options.data)
    settings = {
        item.name: getattr(options, item.name)
        for item in dataclasses.fields(TrainingConfig)
        if item.name != "facts"
    }
    settings["without"] = tuple(settings["without"])
    config = TrainingConfig(**settings)
    # torchrun's processes have each chosen their GPU by now, so "cuda" is the right one.
    model = load_target(options.target, options.dtype, options.device)
    facts = {
        "target": options.target,
        "dtype": str(model.dtype),
        "data_manifest": data.manifest_hash,
        "init": options.init,
        "processes": crew.size,
        "torch": torch.__version__,
        "longspark": __version__,
    }
    config = dataclasses.replace(config, facts=facts)
    torch.manual_seed(config.seed)
    drafter = _drafter(options, model).float().to(model.device)
    features = Features(model, drafter.config, options.cache)
    used = data.sequences["train"] + data.sequences["held_out"][: options.eval_sequences]
    print(features.announce(used), flush=True)
    count = sum(p.numel() for p in drafter.parameters())
    print(f"drafter: {count:,} parameters, taps {list(drafter.config.tapped_layers)}", flush=True)
    parts = TargetParts.from_hf(model)
    trainer = Trainer(drafter, features, parts, data, config, output, crew)
    if (known := trainer.vocabulary) is not None:
        print(
            f"losses over {len(known.tokens)} of {drafter.config.vocab_size} tokens, which are "
            f"{known.coverage:.2%} of the answers'",
            flush=True,
        )
    if options.resume:
        trainer.resume()
    trainer.run(
        min(options.stop_at or config.steps, config.steps),
        eval_every=options.eval_every,
        eval_sequences=options.eval_sequences,
        save_every=options.save_every,
        line_every=options.line_every,
        tensorboard=options.tensorboard,
    )
    return 0


def _drafter(options: argparse.Namespace, model: Any) -> LongSparkDrafter:
    if options.init:
        return LongSparkDrafter.from_pretrained(options.init, dtype=torch.float32)
    mask = options.mask_token_id
    if mask is None:
        from transformers import AutoTokenizer

        mask = AutoTokenizer.from_pretrained(options.target).mask_token_id
    if mask is None:
        raise TrainingError(
            "no mask token",
            ["the tokenizer has none: give --mask-token-id, a token id that no text uses"],
        )
    return LongSparkDrafter(
        LongSparkConfig.for_target(
            model.config,
            mask_token_id=mask,
            target_layer_ids=options.layer_ids,
            num_layers=len(options.layer_ids) if options.layer_ids else options.layers,
            num_draft_tokens=options.draft_tokens,
            summary_slots=options.summary_slots,
            window=options.window,
            markov_rank=options.markov_rank,
            intermediate_size=options.intermediate_size,
        )
    )
