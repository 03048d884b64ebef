"""The module as a whole: names, sizes, loading, refusals, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from longspark_sglang import checkpoint
from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter import (
    InputError,
    LongSparkDrafter,
    TargetParts,
    collect_views,
    summary_of,
)
from tiny_targets import VOCAB, make_drafter, make_target

# hidden, query heads, MLP width, target layers; tensors, parameters, bytes of model.safetensors
RELEASES = {
    "Qwen3-4B": (2560, 32, 9728, 36, 65, 641_778_432, 1_283_564_720),
    "Qwen3-8B": (4096, 32, 12288, 36, 65, 1_193_882_880, 2_387_773_688),
    "Qwen3-14B": (5120, 40, 17408, 40, 65, 1_965_736_192, 3_931_480_336),
}


@pytest.mark.parametrize("name", RELEASES)
def test_released_drafters_on_the_meta_device(name: str) -> None:
    hidden, heads, inner, layers, tensors, parameters, file_size = RELEASES[name]
    target = dict(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=151936,
        num_hidden_layers=layers,
        rope_theta=1e6,
    )
    config = LongSparkConfig.for_target(target, mask_token_id=151669)
    with torch.device("meta"):
        drafter = LongSparkDrafter(config).bfloat16()
    state = drafter.state_dict()
    assert {name: tuple(x.shape) for name, x in state.items()} == (
        checkpoint.expected_tensors(config)
    )
    assert len(state) == tensors
    assert sum(x.numel() for x in drafter.parameters()) == parameters
    assert checkpoint.parameter_count(config) == parameters
    assert checkpoint.predicted_file_size(config) == file_size
    wanted_ids = (0, 10, 20, 29, 39) if layers == 40 else (0, 9, 18, 26, 35)
    assert config.tapped_layers == wanted_ids


def test_saved_drafter_loads_again(tmp_path: Path) -> None:
    drafter = make_drafter(make_target(heads=6, kv_heads=2)).bfloat16()
    checkpoint.save(drafter, drafter.config, tmp_path)
    again = LongSparkDrafter.from_pretrained(tmp_path)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    wide = LongSparkDrafter.from_pretrained(tmp_path, torch.float32)
    assert wide.summary_queries.dtype == torch.float32
    assert wide.summary_queries.requires_grad


def test_random_start() -> None:
    """Queries as the release starts them, std 1/sqrt(d); norms at 1; the same by the seed."""
    config = make_drafter(make_target(heads=4, kv_heads=2)).config
    one, two = LongSparkDrafter(config), LongSparkDrafter(config)
    one.reset_parameters(torch.Generator().manual_seed(3))
    two.reset_parameters(torch.Generator().manual_seed(3))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert abs(one.summary_queries.std().item() * 16**0.5 - 1) < 0.1
    assert (one.parallel_qwen_layers[0].input_layernorm.weight == 1).all()


def arguments(target, drafter: LongSparkDrafter, batch: int = 2) -> dict:
    ids = torch.randint(0, VOCAB, (batch, 40), generator=torch.Generator().manual_seed(0))
    views = collect_views(target, ids[:, :-1], drafter.config)
    value, _ = summary_of(drafter.summary_queries, views.key, views.value)
    return dict(
        anchor=ids[:, -1],
        boundary=views.boundary[:, -1],
        summary_value=value,
        window_key=views.key[:, :, -8:],
        window_value=views.value[:, :, -8:],
        window_lens=torch.tensor([8] * batch),
        positions=torch.tensor([39] * batch),
        target=TargetParts.from_hf(target),
    )


@pytest.mark.parametrize(
    "sizes",
    [
        dict(num_draft_tokens=1, summary_slots=1, window=8, num_layers=2),
        dict(num_draft_tokens=16, summary_slots=32, window=1024, markov_rank=3),
        dict(num_draft_tokens=3, intermediate_size=17, target_layer_ids=(2,)),
    ],
)
def test_any_sizes_propose(sizes: dict) -> None:
    target = make_target(heads=4, kv_heads=2)
    drafter = make_drafter(target, **sizes)
    proposal = drafter.propose(**arguments(target, drafter))
    slots = drafter.config.num_draft_tokens
    assert proposal.draft_tokens.shape == proposal.draft_logprob.shape == (2, slots)
    assert proposal.base_logits.shape == (2, slots, VOCAB)
    assert proposal.hidden.shape == (2, slots, 48)


def test_draws_depend_on_the_generator_alone() -> None:
    target = make_target(heads=4, kv_heads=2)
    drafter = make_drafter(target)
    given = arguments(target, drafter, batch=8)
    hot = torch.full((8,), 2.0)

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return drafter.propose(**given, temperature=hot, generator=generator).draft_tokens

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_padded_vocabulary_is_never_proposed() -> None:
    target = make_target(heads=4, kv_heads=2)
    drafter = make_drafter(target)
    given = arguments(target, drafter)
    free = drafter.propose(**given).draft_tokens
    limit = int(free.max())
    given["target"] = TargetParts.from_hf(target, vocab_limit=limit)
    assert (drafter.propose(**given).draft_tokens < limit).all()


def test_bad_arguments_are_listed_at_once() -> None:
    target = make_target(heads=4, kv_heads=2)
    drafter = make_drafter(target, window=8)
    given = arguments(target, drafter)
    given["boundary"] = given["boundary"][:, :2]
    given["summary_value"] = given["summary_value"][:1]
    given["window_key"] = torch.zeros(2, 3, 9, 2, 16)
    with pytest.raises(InputError) as caught:
        drafter.propose(**given)
    assert [reason.split()[0] for reason in caught.value.reasons] == [
        "boundary", "summary_value", "window_value", "the",
    ]  # fmt: skip
    assert "boundary has shape [2, 2, 48], it should be [B=2, L=3, h=48]" in str(caught.value)
    assert "the window has 9 rows, the drafter's is 8" in str(caught.value)


def test_gradients_reach_every_parameter() -> None:
    """Training uses the same pieces that `propose` strings together."""
    target = make_target(heads=4, kv_heads=2)
    drafter = make_drafter(target)
    given = arguments(target, drafter)
    parts = given["target"]
    views_value = summary_of(drafter.summary_queries, given["window_key"], given["window_value"])[0]
    c = drafter.boundary_vector(given["boundary"])
    x = drafter.block_inputs(given["anchor"], c, parts.embed_tokens)
    hidden = drafter.decode_block(
        x,
        views_value,
        # Rows beyond the used ones are never written in serving: NaN must not reach a gradient.
        torch.cat((given["window_key"], torch.full((2, 3, 1, 2, 16), torch.nan)), dim=2),
        torch.cat((given["window_value"], torch.full((2, 3, 1, 2, 16), torch.nan)), dim=2),
        given["window_lens"],
        given["positions"],
        parts.rope,
    )
    gold = torch.arange(14).view(2, 7)
    logits = drafter.parallel_markov_head(drafter.base_logits(hidden, parts), gold)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), gold.flatten()).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


def test_import_needs_neither_sglang_nor_transformers() -> None:
    code = (
        "import sys; sys.modules['sglang'] = sys.modules['transformers'] = None; "
        "import longspark_sglang.drafter, longspark_sglang.checkpoint"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_config_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import longspark_sglang.config"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
