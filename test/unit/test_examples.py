"""The rooms of examples/: the converted target, the random drafter, the caches they live in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from longspark_sglang import checkpoint
from longspark_sglang.config import ConfigError, LongSparkConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import random_drafter
import serve
import smollm2


@pytest.mark.parametrize("layers", [2, 5])
def test_random_drafter_loads_and_fits_its_target(
    tiny_target: Path, tmp_path: Path, layers: int
) -> None:
    folder = random_drafter.random_drafter(str(tiny_target), tmp_path / "d", layers=layers)
    config = LongSparkConfig.from_pretrained(folder)
    assert config.num_layers == layers
    assert config.mask_token_id == 3  # the tokenizer's <mask>
    assert config.validate_target(json.loads((tiny_target / "config.json").read_text())) == []
    state = checkpoint.load_state(folder, config, torch.float32)
    assert state["parallel_markov_head.markov_w1.weight"].std() > 0
    assert "Untrained" in (folder / "README.md").read_text()


def test_random_drafter_is_seeded(tiny_target: Path, tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        folder = random_drafter.random_drafter(str(tiny_target), tmp_path / name, seed=seed)
        return (folder / checkpoint.WEIGHTS_NAME).read_bytes()

    assert weights("a", 0) == weights("b", 0) != weights("c", 1)


def test_a_target_that_cannot_have_a_drafter_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    for file in tiny_target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "unheard_of", "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="unheard_of"):
        random_drafter.random_drafter(str(tmp_path), tmp_path / "d")


def test_unrotate_keeps_attention_scores() -> None:
    """RoPE on neighbours (GGUF's order) and on halves (transformers') must score alike."""
    heads, d, width = 3, 8, 5
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(heads * d, width, generator=generator).double() for _ in range(2))
    x, y = (torch.randn(width, generator=generator).double() for _ in range(2))
    frequency = 100.0 ** (-torch.arange(0, d, 2).double() / d)

    def on_neighbours(vector: torch.Tensor, position: int) -> torch.Tensor:
        a, b = vector.view(heads, d // 2, 2).unbind(-1)
        cos, sin = (position * frequency).cos(), (position * frequency).sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).view(heads, d)

    def on_halves(vector: torch.Tensor, position: int) -> torch.Tensor:
        a, b = vector.view(heads, 2, d // 2).unbind(1)
        cos, sin = (position * frequency).cos(), (position * frequency).sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    expected = (on_neighbours(q @ x, 7) * on_neighbours(k @ y, 3)).sum(-1)
    q, k = smollm2.unrotate(q, heads), smollm2.unrotate(k, heads)
    torch.testing.assert_close((on_halves(q @ x, 7) * on_halves(k @ y, 3)).sum(-1), expected)


def test_cache_root_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LONGSPARK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache_root() == tmp_path / "xdg/longspark"
    monkeypatch.setenv("LONGSPARK_CACHE", str(tmp_path / "own"))
    assert smollm2.cache_root() == tmp_path / "own"


def test_a_wrong_file_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LONGSPARK_CACHE", str(tmp_path))

    def obtain_gguf(work: Path) -> Path:
        (work / "model.gguf").write_bytes(b"not this one")
        return work / "model.gguf"

    monkeypatch.setattr(smollm2, "obtain_gguf", obtain_gguf)
    with pytest.raises(SystemExit, match=r"has sha256 .* expected b179c952"):
        smollm2.smollm2()
    assert list(tmp_path.iterdir()) == []


def test_smollm2_answers() -> None:
    """The real conversion (once per cache), and that the model still knows something."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.smollm2()
    assert smollm2.smollm2() == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    text = tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
    assert "Apache-2.0" in (folder / "README.md").read_text()


def test_drafter_of_a_pair_is_made_once_and_said_to_be_random(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("LONGSPARK_CACHE", str(tmp_path))
    model, draft = serve.find_pair(str(tiny_target), None)
    assert "RANDOM (untrained" in capsys.readouterr().out
    assert (model, draft) == serve.find_pair(str(tiny_target), None)
    assert [path.name for path in tmp_path.iterdir()] == [Path(draft).name]
    capsys.readouterr()

    assert serve.find_pair(str(tiny_target), "some/hub-id") == (str(tiny_target), "some/hub-id")
    assert "RANDOM" not in capsys.readouterr().out


def test_the_demo_drafter_is_the_default_and_fits_its_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "smollm2", lambda: tmp_path)
    assert serve.find_pair(None, None) == (str(tmp_path), str(serve.DEMO_DRAFTER))
    assert serve.find_pair(None, "mine") == (str(tmp_path), "mine")
    config = LongSparkConfig.from_pretrained(serve.DEMO_DRAFTER)
    target = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    assert config.validate_target(target) == []
    assert config.mask_token_id == serve.SMOLLM2_MASK_TOKEN
    state = checkpoint.load_state(serve.DEMO_DRAFTER, config, torch.float32)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    weights = serve.DEMO_DRAFTER / checkpoint.WEIGHTS_NAME
    assert weights.stat().st_size < 24_000_000  # it is committed
    card = (serve.DEMO_DRAFTER / "README.md").read_text()
    assert "HuggingFaceTB" in card and "Apache-2.0" in card and "dequantised from Q4_1" in card
    record = json.loads((serve.DEMO_DRAFTER / "made_of.json").read_text())
    assert all(len(set(ids)) >= 30 for ids in record["held_out"].values())
