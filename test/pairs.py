"""Seeded tiny targets and LongSpark drafters whose accept length really varies.

Nothing here is trained. The target is built so that its next token is known in advance most of
the time, and the drafter is told that knowledge through its Markov matrices:

* Every ordinary token sits on one cycle. The code of the k-th token of the cycle is ``turn^k``
  applied to one start vector, so "the token after" is one fixed orthogonal matrix, ``turn``.
* An embedding row is ``[constant, code, small noise]``. The layers are random and only *perturb*
  the residual stream, by attention that is sharp enough to depend on the whole context.
  The last MLP turns the code by one step, and the head compares the result with every code.
* So the target follows the cycle except where the context pushes it elsewhere, and a bigram model
  (the drafter's W2 W1) can be right as often as the recipe allows: ``agreement="high"``
  encodes ``turn``, ``"low"`` encodes its inverse and is nearly always wrong, ``"random"`` is noise.

The rest of the drafter is random and small, yet not zero: its drafts depend a little on the
boundary, the summary and the window, so that a fault in any of them changes an accept length.

The target is float32 on disk (serve it with ``--dtype float32``: "auto" would turn it into float16)
and the drafter bfloat16, as the released checkpoints are.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<mask>")
BOS, EOS, PAD, MASK = range(4)
FIRST_ORDINARY = len(SPECIAL_TOKENS)
RECIPE_FILE = "pair_recipe.json"

# The small target of the distribution tests: 2.4 nats of entropy at temperature 1, and the first
# three tokens (125,000 sequences) can be enumerated.
FIFTY: dict[str, Any] = {
    "vocab": 50,
    "hidden": 64,
    "layers": 4,
    "heads": 2,
    "kv_heads": 1,
    "code_size": 24,
    "context": 1.5,
    "logit_scale": 7.0,
    "max_positions": 4096,
}

CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class _Code:
    """The cycle of ordinary tokens and their code vectors, recomputed from a recipe."""

    def __init__(self, vocab: int, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ordinary = vocab - FIRST_ORDINARY
        self.cycle = torch.randperm(ordinary, generator=generator) + FIRST_ORDINARY
        angles = torch.rand(size // 2, generator=generator, dtype=torch.float64) * 2 * math.pi
        steps = torch.arange(ordinary, dtype=torch.float64)[:, None] * angles
        self.vectors = torch.zeros(vocab, size)  # unit rows; special tokens have none
        on_cycle = torch.stack([steps.cos(), steps.sin()], dim=-1).reshape(ordinary, size)
        self.vectors[self.cycle] = (on_cycle / math.sqrt(size // 2)).float()
        cos, sin = angles.cos(), angles.sin()
        planes = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        self.turn = torch.block_diag(*planes).float()


def _normal(generator: torch.Generator, *shape: int, std: float) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * std


def make_target(
    directory: str | os.PathLike[str],
    *,
    vocab: int = 2048,
    layers: int = 6,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate: int | None = None,
    tied: bool = False,
    architecture: str = "qwen3",
    seed: int = 0,
    max_positions: int = 32768,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    sliding_window: int | None = None,
    padded_to: int | None = None,
    code_size: int | None = None,
    logit_scale: float = 36.0,
    context: float = 1.9,
) -> Path:
    """Write a transformers folder (float32) with its tokenizer and return its path.

    ``vocab`` is the tokenizer's size; ``padded_to`` makes the model's vocabulary larger than that.
    ``context`` scales what attention and the MLPs add to the residual stream: more of it means less
    agreement with the cycle. ``logit_scale`` is the logit of a perfectly matching token, so it sets
    the entropy at temperature 1. ``architecture`` is "qwen3" or "llama". With ``sliding_window``
    every even layer sees that many tokens only: the folder is then a dense Mellum (Qwen3 with layer
    types), which SGLang serves with its hybrid cache.
    """
    if architecture not in ("qwen3", "llama"):
        raise ValueError(f'architecture must be "qwen3" or "llama", not {architecture!r}')
    if sliding_window is not None and architecture != "qwen3":
        raise ValueError("sliding_window needs architecture='qwen3'")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    rows = padded_to or vocab
    intermediate = intermediate or 2 * hidden
    code_size = code_size or min(64, (hidden - 1) // 2 * 2)
    # The logit that the right token really gets: what the layers add takes its part of the norm.
    # The factor 0.21 is a fit to measurements over `context`; test_pairs.py holds its consequence.
    reached = logit_scale * math.sqrt(code_size / (code_size + 0.21 * hidden * context**2))
    recipe = {"vocab": vocab, "code_size": code_size, "seed": seed, "logit_reached": reached}
    (directory / RECIPE_FILE).write_text(json.dumps(recipe))

    code = _Code(vocab, code_size, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    in_code = slice(1, 1 + code_size)  # dim 0 holds a constant that no layer writes
    row_norm = math.sqrt(code_size)  # about one per dimension, like the layers' random inputs

    embedding = _normal(generator, rows, hidden, std=0.05)
    embedding[:vocab, in_code] = code.vectors * row_norm
    embedding[:, 0] = 1.0
    # The head of an untied target sees the code through a rotation of its own, so that confusing
    # the head with the embedding gives garbage instead of a nearly right answer.
    head_view = torch.eye(code_size)
    if not tied:
        head_view = torch.linalg.qr(_normal(generator, code_size, code_size, std=1.0))[0]

    weights: dict[str, torch.Tensor] = {"model.embed_tokens.weight": embedding}
    spread = context / math.sqrt(layers)
    for i in range(layers):
        name = f"model.layers.{i}."
        # Sharp scores (standard deviation about 4): a few context rows decide, and which ones
        # changes with every position, so long contexts do not average out.
        sharp = 2.0 if architecture == "llama" else 1.0
        projection = {
            "self_attn.q_proj": (heads * head_dim, hidden, sharp / math.sqrt(hidden)),
            "self_attn.k_proj": (kv_heads * head_dim, hidden, sharp / math.sqrt(hidden)),
            "self_attn.v_proj": (kv_heads * head_dim, hidden, 1 / math.sqrt(hidden)),
            "self_attn.o_proj": (hidden, heads * head_dim, spread / math.sqrt(heads * head_dim)),
            "mlp.gate_proj": (intermediate, hidden, 1 / math.sqrt(hidden)),
            "mlp.up_proj": (intermediate, hidden, 1 / math.sqrt(hidden)),
            "mlp.down_proj": (hidden, intermediate, spread / math.sqrt(intermediate)),
        }
        for part, (out_features, in_features, std) in projection.items():
            weights[f"{name}{part}.weight"] = _normal(generator, out_features, in_features, std=std)
        weights[f"{name}self_attn.o_proj.weight"][0] = 0
        weights[f"{name}mlp.down_proj.weight"][0] = 0
        weights[f"{name}input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{name}post_attention_layernorm.weight"] = torch.ones(hidden)
        if architecture == "qwen3":
            weights[f"{name}self_attn.q_norm.weight"] = torch.full((head_dim,), 2.0)
            weights[f"{name}self_attn.k_norm.weight"] = torch.full((head_dim,), 2.0)

    # The last MLP is linear: its gate sees only the constant, far in the linear part of SiLU.
    last = f"model.layers.{layers - 1}.mlp."
    gate = torch.zeros(intermediate, hidden)
    gate[:code_size, 0] = 10.0
    up = torch.zeros(intermediate, hidden)
    up[:code_size, in_code] = torch.eye(code_size)
    down = torch.zeros(hidden, intermediate)
    down[in_code, :code_size] = head_view @ code.turn - 0.25 * torch.eye(code_size)
    weights.update({f"{last}gate_proj.weight": gate, f"{last}up_proj.weight": up})
    weights[f"{last}down_proj.weight"] = down

    if not tied:
        head = _normal(generator, rows, hidden, std=0.02)
        head[:vocab, in_code] = code.vectors @ head_view.T
        head[:, 0] = 0
        weights["lm_head.weight"] = head
    head_row_norm = row_norm if tied else 1.0
    weights["model.norm.weight"] = torch.full(
        (hidden,), logit_scale / (math.sqrt(hidden) * head_row_norm)
    )
    if tied:
        weights["model.norm.weight"][0] = 0  # the same for every token, so of no use to anybody
    rope = {"rope_type": "default", "rope_theta": rope_theta, **(rope_scaling or {})}
    extra: dict[str, Any] = {}
    if sliding_window is not None:
        architecture = "mellum"
        kinds = ("sliding_attention", "full_attention")
        extra["sliding_window"] = sliding_window
        extra["layer_types"] = [kinds[i % 2] for i in range(layers)]
        extra["mlp_layer_types"] = ["dense"] * layers
        rope = {kind: rope for kind in kinds}
    _save_target_config(
        directory,
        architecture=architecture,
        tied=tied,
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=rope,
        **extra,
    )
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(directory, vocab, max_positions)
    return directory


def _save_target_config(directory: Path, *, architecture: str, tied: bool, **fields: Any) -> None:
    from transformers import GenerationConfig, LlamaConfig, MellumConfig, Qwen3Config

    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config_class, model_class = {
        "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
        "llama": (LlamaConfig, "LlamaForCausalLM"),
        "mellum": (MellumConfig, "MellumForCausalLM"),
    }[architecture]
    config_class(
        architectures=[model_class],
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        dtype="float32",
        **ids,
        **fields,
    ).save_pretrained(directory)
    GenerationConfig(**ids).save_pretrained(directory)


def write_tokenizer(directory: Path, vocab: int, max_positions: int) -> None:
    """A byte-level BPE tokenizer of exactly ``vocab`` tokens; below 260, one of single characters.

    The merges are syllables by rule, not learned from a text: no corpus, and the same everywhere.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "etaoinshrdlucmfwygpbvkxqjz"
    tokens = list(SPECIAL_TOKENS)
    merges: list[tuple[str, str]] = []
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab >= len(tokens) + len(alphabet):
        tokens += alphabet
        candidates = [("Ġ", a) for a in letters]
        candidates += [(a, b) for a in letters for b in letters]
        candidates += [("Ġ" + a, b) for a in letters for b in letters]
        pairs = [a + b for a in letters[:16] for b in letters[:16]]
        candidates += [(p, q) for p in pairs for q in pairs]
        merges = candidates[: vocab - len(tokens)]
        tokens += [a + b for a, b in merges]
    else:
        tokens += list(
            ("Ġ" + letters + "0123456789.,:;!?\"'(){}[]<>-+*/=_\\@#$%^&|~`")[: vocab - 4]
        )
    if len(tokens) != vocab:
        raise ValueError(f"no tokenizer of {vocab} tokens: the rule ends at {len(tokens)}")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=merges, unk_token="<pad>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        mask_token="<mask>",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def make_drafter(
    directory: str | os.PathLike[str],
    target_dir: str | os.PathLike[str],
    *,
    layer_ids: Sequence[int] | None = None,
    agreement: str = "high",
    rank: int | None = None,
    seed: int = 0,
    R: int = 16,
    W: int = 256,
    K: int = 7,
    noise: float = 0.3,
) -> Path:
    """Write a LongSpark drafter in the released format for a target made by `make_target`.

    ``layer_ids`` defaults to three full-attention layers spread over the target, among them the
    last. ``rank`` defaults to the target's code size, at which the bigram map is exact. ``noise``
    scales the random part of the drafter's residual stream, hence of its base logits.
    """
    if agreement not in ("high", "low", "random"):
        raise ValueError(f'agreement must be "high", "low" or "random", not {agreement!r}')
    directory, target_dir = Path(directory), Path(target_dir)
    directory.mkdir(parents=True, exist_ok=True)
    target = json.loads((target_dir / "config.json").read_text())
    recipe = json.loads((target_dir / RECIPE_FILE).read_text())
    h, inner, rows = target["hidden_size"], target["intermediate_size"], target["vocab_size"]
    heads, kv_heads, d = (
        target["num_attention_heads"],
        target["num_key_value_heads"],
        target["head_dim"],
    )
    kinds = target.get("layer_types") or ["full_attention"] * target["num_hidden_layers"]
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    spread = sorted({full[0], full[len(full) // 2], full[-1]})
    taps = list(layer_ids) if layer_ids is not None else spread
    rank = rank or recipe["code_size"]
    generator = torch.Generator().manual_seed(1000 + seed)

    def linear(out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        return _normal(generator, out_features, in_features, std=gain / math.sqrt(in_features))

    weights = {
        "draft_state_encoder.proj.net.0.weight": linear(h, len(taps) * h),
        "draft_state_encoder.proj.net.2.weight": linear(h, h),
        "draft_state_encoder.norm.weight": torch.ones(h),
        "parallel_shifted_input.position_embedding.weight": _normal(generator, K, h, std=0.5),
        "parallel_shifted_input.proj.net.0.weight": linear(h, 2 * h),
        "parallel_shifted_input.proj.net.2.weight": linear(h, h),
        "parallel_shifted_input.norm.weight": torch.full((h,), noise),
        "global16_raw256_reference.global_query_generator.learned_query": _normal(
            generator, len(taps), heads, R, d, std=1.0
        ),
    }
    # Base logits are the target's head on a *normalised* vector, so "small" needs a place to put
    # the norm: dim 0, which the head ignores. The slot embedding carries a constant there, the
    # input MLP passes it on through one hidden unit, and no layer writes it.
    weights["parallel_shifted_input.position_embedding.weight"][:, 0] = math.sqrt(h)
    first = weights["parallel_shifted_input.proj.net.0.weight"]
    first[0], first[0, 0] = 0, 1.0
    first[1:, 0] = 0
    second = weights["parallel_shifted_input.proj.net.2.weight"]
    second[0], second[0, 0] = 0, 1.0
    second[1:, 0] = 0
    weights["parallel_shifted_input.norm.weight"][0] = 1.0
    for i in range(len(taps)):
        name = f"parallel_qwen_layers.{i}."
        weights |= {
            f"{name}input_layernorm.weight": torch.ones(h),
            f"{name}self_attn.q_proj.weight": linear(heads * d, h),
            f"{name}self_attn.k_proj.weight": linear(kv_heads * d, h),
            f"{name}self_attn.v_proj.weight": linear(kv_heads * d, h),
            f"{name}self_attn.q_norm.weight": torch.full((d,), 1.5),
            f"{name}self_attn.k_norm.weight": torch.full((d,), 1.5),
            f"{name}self_attn.o_proj.weight": linear(h, heads * d, noise),
            f"{name}post_attention_layernorm.weight": torch.ones(h),
            f"{name}mlp.gate_proj.weight": linear(inner, h, 4.0),
            f"{name}mlp.up_proj.weight": linear(inner, h, 4.0),
            f"{name}mlp.down_proj.weight": linear(h, inner, noise / 4),
        }
        weights[f"{name}self_attn.o_proj.weight"][0] = 0
        weights[f"{name}mlp.down_proj.weight"][0] = 0
    w1, w2 = _markov(recipe, rows, rank, agreement, generator)
    weights["parallel_markov_head.markov_w1.weight"] = w1
    weights["parallel_markov_head.markov_w2.weight"] = w2

    rope = target["rope_parameters"]
    rope = rope.get("full_attention", rope)
    config = {
        "architectures": ["DraftFreeKVModel"],
        "model_type": "draftfreekv",
        "dtype": "bfloat16",
        "draft_mode": "parallel_shifted_qwen",
        "global16_raw256_enabled": True,
        "block_size": K,
        "target_layer_ids": taps,
        "num_target_layers": target["num_hidden_layers"],
        "hidden_size": h,
        "num_key_value_heads": kv_heads,
        "head_dim": d,
        "qwen_num_attention_heads": heads,
        "qwen_intermediate_size": inner,
        "qwen_rope_theta": rope["rope_theta"],
        "qwen_rms_norm_eps": target["rms_norm_eps"],
        "vocab_size": rows,
        "mask_token_id": MASK,
        "parallel_mixer_layers": len(taps),
        "parallel_markov_rank": rank,
        "parallel_markov_head_type": "vanilla",
        "global_memory_slots": R,
        "raw_target_rows": W,
        "local_draft_rows": K,
        "max_accepted_tokens": K + 1,
        "global_memory_source_window": "full",
        "global_checkpoint_compatibility": "retrain_required",
        "global_query_mode": "learned",
        "target_kv_memory_layout": "direct",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def _markov(
    recipe: dict[str, Any], rows: int, rank: int, agreement: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """W1 and W2, both [rows, rank]: W2 W1[previous] are bigram logits on the target's scale."""
    vocab, size = recipe["vocab"], recipe["code_size"]
    w1, w2 = torch.zeros(rows, rank), torch.zeros(rows, rank)
    if agreement == "random":
        w1.normal_(generator=generator)
        w2.normal_(generator=generator).mul_(recipe["logit_reached"] / rank)
        return w1, w2
    code = _Code(vocab, size, recipe["seed"])
    step = code.turn if agreement == "high" else code.turn.T
    kept = min(size, rank)
    scale = recipe["logit_reached"] * size / kept
    w1[:vocab, :kept] = (code.vectors @ step.T)[:, :kept]
    w2[:vocab, :kept] = code.vectors[:, :kept] * scale
    return w1, w2


class PairCache:
    """Makes each pair once per recipe and version of this file, in a folder that outlives a run."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
        self.root = Path(root) / source

    def target(self, **recipe: Any) -> Path:
        """The folder of `make_target` with these arguments."""
        return self._made("target", recipe, lambda folder: make_target(folder, **recipe))

    def drafter(self, target: Path, **recipe: Any) -> Path:
        """The folder of `make_drafter` for a target of this cache, with these arguments."""
        key = {"target": target.name, **recipe}
        return self._made("drafter", key, lambda folder: make_drafter(folder, target, **recipe))

    def _made(self, kind: str, recipe: dict[str, Any], make: Callable[[Path], Path]) -> Path:
        text = json.dumps(recipe, sort_keys=True)
        final = self.root / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if not final.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(dir=self.root, prefix="making-"))
            make(draft)
            try:
                draft.rename(final)
            except OSError:  # another run was faster; its folder holds the same bytes
                shutil.rmtree(draft)
        return final
