"""A seeded, untrained LongSpark drafter in the released format, for any target that can have one.

It shows that the whole path works and nothing more: its drafts are almost never accepted, so
serving with it is slower than serving without. The target's output is the same either way.

    python examples/random_drafter.py TARGET FOLDER    # TARGET: a folder or a hub id
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from longspark_sglang.checkpoint import WEIGHTS_NAME, expected_tensors
from longspark_sglang.config import LongSparkConfig
from safetensors.torch import save_file

NOTICE = """# Random LongSpark drafter

Untrained: random weights (seed {seed}) for the target {target}.
Written by examples/random_drafter.py of longspark-sglang. Expect accept lengths near 1.
"""


def random_drafter(
    target: str,
    folder: str | Path,
    *,
    seed: int = 0,
    layers: int = 5,
    markov_rank: int = 64,
    mask_token_id: int | None = None,
) -> Path:
    """Write the drafter for ``target`` (a folder or a hub id) into ``folder`` and return it.

    ``mask_token_id`` stands for a token that is still to be drafted; any id that no prompt contains
    will do. It defaults to the tokenizer's mask token, else to the last id of the vocabulary.

    Raises `longspark_sglang.config.ConfigError` when the target cannot have a LongSpark drafter.
    """
    from transformers import AutoConfig, AutoTokenizer

    target_config = AutoConfig.from_pretrained(target)
    if mask_token_id is None:
        mask_token_id = AutoTokenizer.from_pretrained(target).mask_token_id
    if mask_token_id is None:
        mask_token_id = target_config.vocab_size - 1
    config = LongSparkConfig.for_target(
        target_config,
        mask_token_id=mask_token_id,
        num_layers=min(layers, target_config.num_hidden_layers),
        markov_rank=markov_rank,
    )
    folder = Path(folder)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random(name, shape, generator) for name, shape in expected_tensors(config).items()
    }
    save_file(weights, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / "README.md").write_text(NOTICE.format(seed=seed, target=target))
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms are 1; everything else keeps the size of what it is given."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    std = 1 / math.sqrt(shape[-1])
    return (torch.randn(shape, generator=generator) * std).to(torch.bfloat16)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub id of the target model")
    parser.add_argument("folder", help="where to write the drafter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--markov-rank", type=int, default=64)
    parser.add_argument("--mask-token-id", type=int)
    options = parser.parse_args()
    folder = random_drafter(
        options.target,
        options.folder,
        seed=options.seed,
        layers=options.layers,
        markov_rank=options.markov_rank,
        mask_token_id=options.mask_token_id,
    )
    print(f"{folder}: a RANDOM drafter (untrained, seed {options.seed}); accept lengths near 1")


if __name__ == "__main__":
    main()
