"""The tiny pairs are fit for their purpose: varied output, known agreement, real entropy.

Every serving test rests on these properties, so they are measured here with plain transformers,
without SGLang and without our drafter.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pairs import FIFTY, FIRST_ORDINARY, PairCache, make_drafter, make_target
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGETS = {
    "untied": {},
    "tied": {"tied": True},
    "llama": {"architecture": "llama"},
    "hybrid": {"sliding_window": 24},
    "grouped": {"heads": 4, "kv_heads": 1, "head_dim": 128, "layers": 4},
    "padded": {"padded_to": 2176},
    "fifty": FIFTY,
}
PROMPT, NEW = 40, 200


@pytest.fixture(scope="module")
def generated(pair_cache: PairCache):
    """For a name in TARGETS: (folder, model, tokens [4, PROMPT + NEW]), greedy or at T=1."""
    made = {}

    def generate(name: str, sample: bool = False):
        if (name, sample) not in made:
            folder = pair_cache.target(**TARGETS[name])
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            vocab = json.loads((folder / "pair_recipe.json").read_text())["vocab"]
            generator = torch.Generator().manual_seed(7)
            prompt = torch.randint(FIRST_ORDINARY, vocab, (4, PROMPT), generator=generator)
            torch.manual_seed(7)
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=sample,
                **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
            )
            made[name, sample] = folder, model, tokens
        return made[name, sample]

    return generate


def bigram_logits(drafter: Path, previous: torch.Tensor) -> torch.Tensor:
    """W2 W1[previous] of a drafter folder, float32."""
    weights = load_file(drafter / "model.safetensors")
    w1 = weights["parallel_markov_head.markov_w1.weight"].float()
    w2 = weights["parallel_markov_head.markov_w2.weight"].float()
    return w1[previous] @ w2.T


def agreement_of(drafter: Path, tokens: torch.Tensor) -> float:
    """Share of generated tokens that the bigram map alone predicts."""
    guess = bigram_logits(drafter, tokens[:, PROMPT - 1 : -1]).argmax(-1)
    return (guess == tokens[:, PROMPT:]).float().mean().item()


def loop_length(row: list[int]) -> int:
    """The shortest period with which the row ends twice, 0 if there is none up to half of it."""
    for period in range(1, len(row) // 2):
        if row[-2 * period : -period] == row[-period:]:
            return period
    return 0


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_output_is_varied(generated, name: str) -> None:
    _, _, tokens = generated(name)
    distinct = 20 if name == "fifty" else 120
    for row in tokens[:, PROMPT:].tolist():
        assert len(set(row)) > distinct
        assert loop_length(row) == 0


@pytest.mark.parametrize("name", TARGETS)
def test_drafters_agree_as_often_as_they_say(generated, pair_cache: PairCache, name: str) -> None:
    folder, _, tokens = generated(name)
    high = agreement_of(pair_cache.drafter(folder), tokens)
    assert 0.70 < high < 0.97
    assert agreement_of(pair_cache.drafter(folder, agreement="low"), tokens) < 0.05
    assert agreement_of(pair_cache.drafter(folder, agreement="random"), tokens) < 0.10


@pytest.mark.parametrize("name", ["untied", "tied", "fifty"])
def test_draft_distribution_overlaps_the_targets(
    generated, pair_cache: PairCache, name: str
) -> None:
    """At temperature 1 the chance of acceptance is the overlap, sum of min(p, q)."""
    folder, model, tokens = generated(name, sample=True)
    p = model(tokens).logits[:, PROMPT - 1 : -1].softmax(-1)
    overlap = {}
    for agreement in ("high", "low"):
        drafter = pair_cache.drafter(folder, agreement=agreement)
        q = bigram_logits(drafter, tokens[:, PROMPT - 1 : -1]).softmax(-1)
        overlap[agreement] = torch.minimum(p, q).sum(-1).mean().item()
    assert 0.6 < overlap["high"] < 0.95
    assert overlap["low"] < 0.35


def test_fifty_has_entropy_and_depends_on_context(generated) -> None:
    _, model, tokens = generated("fifty", sample=True)
    p = model(tokens).logits[:, PROMPT - 1 : -1].softmax(-1)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    assert 1.5 < entropy.mean() < 3.0
    assert (entropy > 1.0).float().mean() > 0.9

    last = torch.full((4, 1), FIRST_ORDINARY)
    other_contexts = torch.cat([tokens[:, :PROMPT], last], dim=1)
    p = model(other_contexts).logits[:, -1].softmax(-1)
    assert ((p[0] - p[1:]).abs().sum(-1) / 2).min() > 0.1


@pytest.mark.parametrize("name", ["untied", "padded", "fifty"])
def test_tokenizer_has_exactly_the_vocabulary(generated, name: str) -> None:
    folder, model, _ = generated(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab = TARGETS[name].get("vocab", 2048)
    assert len(tokenizer) == vocab
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab))
    assert model.get_output_embeddings().weight.shape[0] == TARGETS[name].get("padded_to", vocab)
    assert tokenizer.convert_tokens_to_ids(["<bos>", "<eos>", "<pad>", "<mask>"]) == [0, 1, 2, 3]
    if name != "fifty":
        text = "Speculation keeps the text: naïve, 12+3, {}\n"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    message = [{"role": "user", "content": "hello"}]
    rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert rendered == "<bos>user: hello\nassistant: "


def test_same_recipe_same_bytes_and_another_seed_another_model(tmp_path: Path) -> None:
    small = {"vocab": 300, "layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1}
    folders = [
        make_target(tmp_path / "a", **small),
        make_target(tmp_path / "b", **small),
        make_target(tmp_path / "c", seed=1, **small),
    ]
    a, b, c = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert a == b != c
    drafts = [make_drafter(tmp_path / f"d{i}", folders[0], seed=i // 2) for i in range(3)]
    a, b, c = ((folder / "model.safetensors").read_bytes() for folder in drafts)
    assert a == b != c


def test_drafter_has_the_released_names_and_shapes(tmp_path: Path) -> None:
    target = make_target(
        tmp_path / "t", vocab=300, layers=5, hidden=64, heads=4, kv_heads=2, head_dim=32
    )
    folder = make_drafter(
        tmp_path / "d", target, layer_ids=[0, 1, 2, 3, 4], rank=24, R=8, W=32, K=5
    )
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        kinds = {file.get_slice(name).get_dtype() for name in shapes}
    assert kinds == {"BF16"}
    assert len(shapes) == 65
    assert shapes["draft_state_encoder.proj.net.0.weight"] == (64, 5 * 64)
    assert shapes["parallel_shifted_input.position_embedding.weight"] == (5, 64)
    assert shapes["parallel_shifted_input.proj.net.0.weight"] == (64, 128)
    assert shapes["parallel_qwen_layers.4.self_attn.k_proj.weight"] == (2 * 32, 64)
    query = "global16_raw256_reference.global_query_generator.learned_query"
    assert shapes[query] == (5, 4, 8, 32)
    assert shapes["parallel_markov_head.markov_w2.weight"] == (300, 24)


def test_cache_makes_a_pair_once(tmp_path: Path) -> None:
    cache = PairCache(tmp_path)
    small = {"vocab": 50, "layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1}
    first = cache.target(**small)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert cache.target(**small) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert cache.target(**small, tied=True) != first
    assert cache.drafter(first) != cache.drafter(first, agreement="low")
    assert not list(cache.root.glob("making-*"))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"architecture": "gpt2"}, "gpt2"),
        ({"architecture": "llama", "sliding_window": 8}, "sliding_window"),
        ({"vocab": 90_000}, "no tokenizer of 90000 tokens"),
    ],
)
def test_recipes_that_cannot_be_made_are_refused(tmp_path: Path, keywords, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_target(tmp_path, hidden=64, layers=1, **keywords)
