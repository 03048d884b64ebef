"""collect_views: what is taken of a target run, and where."""

from __future__ import annotations

import pytest
import torch
from longspark_sglang.config import ConfigError
from longspark_sglang.drafter import (
    InputError,
    LongSparkDrafter,
    TargetParts,
    collect_views,
    summary_of,
)
from tiny_targets import VOCAB, make_drafter, make_target
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def target():
    return make_target(heads=4, kv_heads=2)


def ids(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


def test_boundary_is_the_residual_stream_and_of_the_last_layer_the_final_norm(target) -> None:
    after: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda module, args, out, i=i: after.__setitem__(i, out))
        for i, layer in enumerate(target.model.layers)
    ]
    config = make_drafter(target, target_layer_ids=(3, 0, 2)).config
    views = collect_views(target, ids(9), config)
    for hook in hooks:
        hook.remove()

    assert views.boundary.shape == (2, 9, 3, 48)
    assert torch.equal(views.boundary[:, :, 1], after[0])
    assert torch.equal(views.boundary[:, :, 2], after[2])
    assert torch.equal(views.boundary[:, :, 0], target.model.norm(after[3]))
    assert not torch.allclose(views.boundary[:, :, 0], after[3], atol=0.1)
    # Of the last layer it is the very vector that enters the head.
    logits = target(ids(9)).logits
    assert torch.allclose(target.lm_head(views.boundary[:, :, 0]), logits, atol=1e-5)
    assert torch.equal(views.hidden, views.boundary[:, :, 0])


def test_rows_are_those_of_the_cache(target) -> None:
    config = make_drafter(target, target_layer_ids=(3, 1)).config
    views = collect_views(target, ids(9), config)
    cache = target(ids(9), use_cache=True).past_key_values
    assert views.key.shape == (2, 2, 9, 2, 16)
    for i, layer in enumerate((3, 1)):
        assert torch.equal(views.key[:, i], cache.layers[layer].keys.transpose(1, 2))
        assert torch.equal(views.value[:, i], cache.layers[layer].values.transpose(1, 2))


def test_a_prefix_has_the_views_of_the_whole(target) -> None:
    """What allows training and tests to run a sequence once for all its anchors."""
    config = make_drafter(target).config
    whole, prefix = (collect_views(target, ids(40)[:, :n], config) for n in (40, 11))
    assert torch.allclose(whole.boundary[:, :11], prefix.boundary, atol=1e-5)
    assert torch.allclose(whole.key[:, :, :11], prefix.key, atol=1e-5)


def test_a_target_that_does_not_fit_is_refused(target) -> None:
    config = make_drafter(make_target(heads=2, kv_heads=2)).config
    with pytest.raises(ConfigError, match="qwen_num_attention_heads 2 differs"):
        collect_views(target, ids(5), config)


def test_a_final_norm_of_another_kind_is_refused(target) -> None:
    other = make_target(heads=2, kv_heads=2)
    other.model.norm = torch.nn.LayerNorm(48)
    with pytest.raises(InputError, match="LayerNorm"):
        TargetParts.from_hf(other)
    assert TargetParts.from_hf(target).norm_eps == 1e-6


def test_tied_head_is_the_embedding() -> None:
    parts = TargetParts.from_hf(make_target(heads=2, kv_heads=2, tied=True))
    assert parts.lm_head.data_ptr() == parts.embed_tokens.data_ptr()


def test_a_hybrid_target_keeps_all_rows_and_drafts_are_accepted(pair_cache) -> None:
    """Sliding-window layers beside the tapped ones, a context beyond their window, real drafts."""
    folder = pair_cache.target(sliding_window=64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drafter = LongSparkDrafter.from_pretrained(pair_cache.drafter(folder), torch.float32)
    parts, width = TargetParts.from_hf(model), drafter.config.window
    prompt = torch.randint(4, 2000, (4, 80), generator=torch.Generator().manual_seed(0))
    text = model.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=None)
    views = collect_views(model, text, drafter.config)
    assert views.key.shape[2] == text.shape[1]
    accept_lengths = []
    for committed in range(81, 130, 6):
        rows = (views.key[:, :, :committed], views.value[:, :, :committed])
        value, _ = summary_of(drafter.summary_queries, *rows)
        drafts = drafter.propose(
            text[:, committed],
            views.boundary[:, committed - 1],
            value,
            rows[0][:, :, -width:],
            rows[1][:, :, -width:],
            torch.full((4,), min(committed, width)),
            torch.full((4,), committed),
            parts,
        ).draft_tokens
        gold = text[:, committed + 1 : committed + 1 + drafts.shape[1]]
        accept_lengths.append((drafts == gold).long().cumprod(1).sum(1) + 1)
    mean = torch.stack(accept_lengths).float().mean().item()
    assert 2 < mean < drafter.config.verify_width  # good, and not by ignoring the context
