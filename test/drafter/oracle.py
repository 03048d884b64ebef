"""A second drafter, written from the specification's text alone, in float64 and plain loops.

It shares no code with ``longspark_sglang.drafter``: it takes the checkpoint's tensors by name, the
raw numbers of the config, and the target's own rotary frequencies. One request at a time, one query
head at a time, one slot at a time: slow, and easy to compare with the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

F64 = torch.float64


@dataclass
class OracleTarget:
    """Float64 copies of what is borrowed of the target."""

    embedding: torch.Tensor  # [V, h]
    norm_weight: torch.Tensor  # [h]
    norm_eps: float
    head: torch.Tensor  # [V, h]
    inverse_frequencies: torch.Tensor  # [d/2] float32: angles are float32 products
    rope_scaling: float = 1.0


@dataclass
class OracleResult:
    c: torch.Tensor  # [h]
    inputs: torch.Tensor  # [K, h]
    hidden: torch.Tensor  # [K, h]
    base_logits: torch.Tensor  # [K, V]
    draft_tokens: list[int]  # greedy
    corrected: torch.Tensor  # [K, V], along the greedy drafts


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


class Oracle:
    def __init__(self, tensors: dict[str, torch.Tensor], config: dict, target: OracleTarget):
        self.w = {name: tensor.to(F64) for name, tensor in tensors.items()}
        self.config = config
        self.target = target
        self.layers = config["parallel_mixer_layers"]
        self.slots = config["block_size"]
        self.heads = config["qwen_num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.dim = config["head_dim"]
        self.eps = config["qwen_rms_norm_eps"]
        self.queries = self.w["global16_raw256_reference.global_query_generator.learned_query"]

    def summary(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Section 4, all rows in one softmax. keys, values [L, N, Hkv, d] -> M, lambda."""
        keys, values = keys.to(F64), values.to(F64)
        slots = self.queries.shape[2]
        m = torch.zeros(self.layers, self.heads, slots, self.dim, dtype=F64)
        lam = torch.zeros(self.layers, self.heads, slots, dtype=F64)
        for layer in range(self.layers):
            for n in range(self.heads):
                kv = n // (self.heads // self.kv_heads)
                s = torch.einsum("sd,id->si", self.queries[layer, n], keys[layer, :, kv])
                s = s / math.sqrt(self.dim)
                top = s.max(dim=1).values
                lam[layer, n] = top + torch.log(torch.exp(s - top[:, None]).sum(1))
                p = torch.exp(s - lam[layer, n][:, None])
                m[layer, n] = torch.einsum("si,id->sd", p, values[layer, :, kv])
        return m, lam

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """One head vector [d] at one position, element by element."""
        half = self.dim // 2
        out = torch.zeros_like(x)
        for i in range(half):
            angle = float(torch.tensor(float(position)) * self.target.inverse_frequencies[i])
            cos = math.cos(angle) * self.target.rope_scaling
            sin = math.sin(angle) * self.target.rope_scaling
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i + half] * cos + x[i] * sin
        return out

    def attention(
        self,
        layer: int,
        y: torch.Tensor,
        position: int,
        m: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Section 3.4, points 1 to 4. y [K, h]; m [Hq, R, d]; window keys, values [n, Hkv, d]."""
        name = f"parallel_qwen_layers.{layer}.self_attn."
        q = (y @ self.w[name + "q_proj.weight"].T).reshape(self.slots, self.heads, self.dim)
        k = (y @ self.w[name + "k_proj.weight"].T).reshape(self.slots, self.kv_heads, self.dim)
        v = (y @ self.w[name + "v_proj.weight"].T).reshape(self.slots, self.kv_heads, self.dim)
        q = rms_norm(q, self.w[name + "q_norm.weight"], self.eps)
        k = rms_norm(k, self.w[name + "k_norm.weight"], self.eps)
        for j in range(self.slots):
            for n in range(self.heads):
                q[j, n] = self.rotated(q[j, n], position + j)
            for n in range(self.kv_heads):
                k[j, n] = self.rotated(k[j, n], position + j)
        out = torch.zeros(self.slots, self.heads, self.dim, dtype=F64)
        for n in range(self.heads):
            kv = n // (self.heads // self.kv_heads)
            all_keys = torch.cat([self.queries[layer, n], keys[:, kv], k[:, kv]])
            all_values = torch.cat([m[n], values[:, kv], v[:, kv]])
            for j in range(self.slots):
                score = (all_keys @ q[j, n]) / math.sqrt(self.dim)
                p = torch.exp(score - score.max())
                out[j, n] = (p / p.sum()) @ all_values
        return out.reshape(self.slots, -1) @ self.w[name + "o_proj.weight"].T

    def propose(
        self,
        anchor: int,
        boundary: torch.Tensor,
        m: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        committed: int,
    ) -> OracleResult:
        """Section 3 for one request.

        boundary [L, h]; m [L, Hq, R, d]; keys, values [L, N, Hkv, d]: all committed rows, of which
        the last W are the window.
        """
        w, target = self.w, self.target
        u = boundary.to(F64).reshape(-1)
        c = w["draft_state_encoder.proj.net.2.weight"] @ silu(
            w["draft_state_encoder.proj.net.0.weight"] @ u
        )
        c = rms_norm(c, w["draft_state_encoder.norm.weight"], self.eps)

        rows = []
        for j in range(self.slots):
            token = anchor if j == 0 else self.config["mask_token_id"]
            e = target.embedding[token] + w["parallel_shifted_input.position_embedding.weight"][j]
            x = w["parallel_shifted_input.proj.net.2.weight"] @ silu(
                w["parallel_shifted_input.proj.net.0.weight"] @ torch.cat([e, c])
            )
            rows.append(rms_norm(x, w["parallel_shifted_input.norm.weight"], self.eps))
        inputs = torch.stack(rows)

        first = max(0, committed - self.config["raw_target_rows"])
        window_keys, window_values = keys[:, first:].to(F64), values[:, first:].to(F64)
        x = inputs
        for layer in range(self.layers):
            name = f"parallel_qwen_layers.{layer}."
            y = rms_norm(x, w[name + "input_layernorm.weight"], self.eps)
            x = x + self.attention(
                layer, y, committed, m[layer], window_keys[layer], window_values[layer]
            )
            z = rms_norm(x, w[name + "post_attention_layernorm.weight"], self.eps)
            gate = silu(z @ w[name + "mlp.gate_proj.weight"].T)
            up = z @ w[name + "mlp.up_proj.weight"].T
            x = x + (gate * up) @ w[name + "mlp.down_proj.weight"].T

        base = rms_norm(x, target.norm_weight, target.norm_eps) @ target.head.T
        drafts: list[int] = []
        corrected = []
        for j in range(self.slots):
            prev = anchor if j == 0 else drafts[j - 1]
            bigram = (
                w["parallel_markov_head.markov_w2.weight"]
                @ (w["parallel_markov_head.markov_w1.weight"][prev])
            )
            z = base[j] + bigram
            corrected.append(z)
            drafts.append(int(torch.argmax(z)))
        return OracleResult(c, inputs, x, base, drafts, torch.stack(corrected))
