"""The frozen target's views of the training sequences: on the fly, or from a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter import collect_views
from longspark_sglang.training.config import TrainingError
from longspark_sglang.training.data import PackedSequence
from longspark_sglang.training.forward import SequenceViews


def bytes_per_token(config: LongSparkConfig, itemsize: int) -> int:
    """Bytes of one token's views: L boundary vectors, 2 L Hkv rows, one final state."""
    layers, h = config.num_layers, config.hidden_size
    rows = 2 * layers * config.num_key_value_heads * config.head_dim
    return (layers * h + rows + h) * itemsize


class Features:
    """Views of a sequence by its token ids.

    Args:
        model: the target; its dtype is that of the views.
        cache: None = compute each time; a folder = compute once, one file per sequence, whatever
            process comes first.
    """

    def __init__(self, model: Any, config: LongSparkConfig, cache: Path | None = None) -> None:
        self.model, self.config, self.cache = model, config, cache
        self.device = next(model.parameters()).device
        weight = model.get_input_embeddings().weight
        # Other taps, another dtype or another target must not find these files.
        probe = weight.detach()[:64].float().sum().item()
        key = [config.tapped_layers, str(weight.dtype), model.config.to_json_string(), probe]
        self._key = repr(key)

    def announce(self, sequences: list[PackedSequence]) -> str:
        """Says what the cache will take, before anything is written.

        TrainingError where the disk has no room for it.
        """
        itemsize = self.model.get_input_embeddings().weight.dtype.itemsize
        each = bytes_per_token(self.config, itemsize)
        tokens = sum(len(s.ids) for s in sequences)
        text = f"target features: {each} bytes per token, {tokens} tokens"
        if self.cache is None:
            return text + ", computed on the fly"
        absent = sum(len(s.ids) for s in sequences if not self._path(s.ids).exists())
        self.cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.cache).free
        if absent * each > free:
            raise TrainingError(
                "the feature cache does not fit",
                [f"it needs {absent * each:,} bytes, the disk has {free:,}: drop --cache"],
            )
        return text + f", {absent * each:,} bytes to be written to {self.cache}"

    def of(self, ids: torch.Tensor) -> SequenceViews:
        """Views of one sequence [T], on the target's device."""
        if self.cache is None:
            return self._compute(ids)
        path = self._path(ids)
        if path.exists():
            try:
                stored = load_file(path, device=str(self.device))
            except SafetensorError as error:
                raise TrainingError(
                    "the feature cache is damaged", [f"{path} ({error}): delete it"]
                ) from None
            return SequenceViews(**stored)
        views = self._compute(ids)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file({k: v.contiguous() for k, v in vars(views).items()}, unfinished)
        unfinished.replace(path)
        return views

    def _compute(self, ids: torch.Tensor) -> SequenceViews:
        views = collect_views(self.model, ids[None].to(self.device), self.config)
        return SequenceViews.of(views)

    def _path(self, ids: torch.Tensor) -> Path:
        assert self.cache is not None
        digest = hashlib.sha256(self._key.encode() + ids.numpy().tobytes()).hexdigest()
        return self.cache / f"{digest[:32]}.safetensors"
