"""The drafter on SGLang's parallel layers: one proposal a round (LongSpark spec, section 3).

Heads are sharded exactly as the target shards its own, because the drafter reads this rank's K/V
rows in place; everything else (boundary and input maps, Markov matrices) is small and replicated.
The embedding, the final norm and the head are the target's modules, asked anew every round, so a
weight update of the target reaches the drafter too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from torch import nn

from longspark_sglang.config import LongSparkConfig
from longspark_sglang.ops.block_attention import block_attention
from longspark_sglang.ops.draft_sample import draft_sample
from longspark_sglang.ops.window_gather import window_index
from longspark_sglang.serving.summary_store import SummaryStore


@dataclass
class Proposal:
    """One round's drafts of a batch.

    Attributes:
        draft_tokens: [B, k] int64, k = verify width - 1.
        draft_logq: [B, k] float32 log-probability each draft token was drawn with (0 where greedy).
        base_logits: [B, K, V] target-head logits before the Markov correction.
    """

    draft_tokens: torch.Tensor
    draft_logq: torch.Tensor
    base_logits: torch.Tensor


def hf_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with the rounding of the checkpoint's training: round x/rms(x), then scale."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


class ParallelLayer(nn.Module):
    """One drafter layer: attention over summary, window and block, then the gated MLP."""

    def __init__(self, config: LongSparkConfig, dtype: torch.dtype, index: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        name = f"longspark.layers.{index}"
        self.eps = config.qwen_rms_norm_eps
        self.head_dim = dim
        self.input_norm = nn.Parameter(torch.empty(hidden, dtype=dtype), requires_grad=False)
        self.post_norm = nn.Parameter(torch.empty(hidden, dtype=dtype), requires_grad=False)
        self.q_norm = nn.Parameter(torch.empty(dim, dtype=dtype), requires_grad=False)
        self.k_norm = nn.Parameter(torch.empty(dim, dtype=dtype), requires_grad=False)
        self.qkv_proj = QKVParallelLinear(
            hidden,
            dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            params_dtype=dtype,
            parallel_group="attn_tp",
            prefix=f"{name}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * dim,
            hidden,
            bias=False,
            params_dtype=dtype,
            parallel_group="attn_tp",
            prefix=f"{name}.o_proj",
        )
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden,
            [config.intermediate_size] * 2,
            bias=False,
            params_dtype=dtype,
            prefix=f"{name}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            hidden,
            bias=False,
            params_dtype=dtype,
            prefix=f"{name}.down_proj",
        )
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads

    def load(self, state: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Copy (this rank's shard of) the checkpoint tensors under `prefix`."""
        self.input_norm.copy_(state[f"{prefix}.input_layernorm.weight"])
        self.post_norm.copy_(state[f"{prefix}.post_attention_layernorm.weight"])
        self.q_norm.copy_(state[f"{prefix}.self_attn.q_norm.weight"])
        self.k_norm.copy_(state[f"{prefix}.self_attn.k_norm.weight"])
        for shard in "qkv":
            self.qkv_proj.weight.weight_loader(
                self.qkv_proj.weight, state[f"{prefix}.self_attn.{shard}_proj.weight"], shard
            )
        for linear, tensor in (
            (self.o_proj, f"{prefix}.self_attn.o_proj.weight"),
            (self.down_proj, f"{prefix}.mlp.down_proj.weight"),
        ):
            linear.weight.weight_loader(linear.weight, state[tensor])
        for shard_id, tensor in enumerate(("gate_proj", "up_proj")):
            self.gate_up_proj.weight.weight_loader(
                self.gate_up_proj.weight, state[f"{prefix}.mlp.{tensor}.weight"], shard_id
            )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend
    ) -> torch.Tensor:
        """x [B, K, h] -> [B, K, h]; `attend(query, key, value)` is this layer's three-source
        attention.
        """
        batch, slots, hidden = x.shape
        normed = hf_rms_norm(x, self.input_norm, self.eps)
        qkv, _ = self.qkv_proj(normed.view(-1, hidden))
        q, k, v = qkv.view(batch, slots, -1, self.head_dim).split(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2
        )
        q = rotate(hf_rms_norm(q, self.q_norm, self.eps), cos, sin)
        k = rotate(hf_rms_norm(k, self.k_norm, self.eps), cos, sin)
        attended = attend(q, k, v.contiguous())
        projected, _ = self.o_proj(attended.reshape(batch * slots, -1))
        x = x + projected.view_as(x)
        normed = hf_rms_norm(x, self.post_norm, self.eps)
        gate, up = self.gate_up_proj(normed.view(-1, hidden))[0].chunk(2, dim=-1)
        projected, _ = self.down_proj(F.silu(gate) * up)
        return x + projected.view_as(x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half RoPE. x [B, K, heads, d]; cos, sin [B, K, 1, d/2] in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class DrafterRunner(nn.Module):
    """Weights of the drafter on this rank, and the proposal.

    Args:
        config: the drafter's config.
        state: the checkpoint's tensors, whole (each rank takes its shard).
        target: SGLang's target model; embedding, final norm, head and RoPE table are borrowed.
        dtype, device: of the target.
        tp_rank, tp_size: the target's attention tensor parallelism.
        vocab_size: the target's real vocabulary; padded ids from there on are never proposed.
        num_drafts: draft tokens a round, 1..K.
    """

    # SGLang's modules, which have no types that mypy could follow.
    target: Any
    rope: Any

    def __init__(
        self,
        config: LongSparkConfig,
        state: Mapping[str, torch.Tensor],
        target: Any,
        dtype: torch.dtype,
        device: torch.device | str,
        tp_rank: int,
        tp_size: int,
        vocab_size: int,
        num_drafts: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_drafts = num_drafts
        self.vocab_size = vocab_size
        # Not registered as a submodule: its weights are the target's, not ours.
        self.__dict__["target"] = target
        self.__dict__["rope"] = _rotary_module(target, config)
        layers = [ParallelLayer(config, dtype, i).to(device) for i in range(config.num_layers)]
        for i, layer in enumerate(layers):
            layer.load(state, f"parallel_qwen_layers.{i}")
        self.layers = nn.ModuleList(layers)

        def tensor(name: str) -> nn.Parameter:
            return nn.Parameter(state[name].to(device=device, dtype=dtype), requires_grad=False)

        self.boundary_in = tensor("draft_state_encoder.proj.net.0.weight")
        self.boundary_out = tensor("draft_state_encoder.proj.net.2.weight")
        self.boundary_norm = tensor("draft_state_encoder.norm.weight")
        self.slot_embedding = tensor("parallel_shifted_input.position_embedding.weight")
        self.input_in = tensor("parallel_shifted_input.proj.net.0.weight")
        self.input_out = tensor("parallel_shifted_input.proj.net.2.weight")
        self.input_norm = tensor("parallel_shifted_input.norm.weight")
        self.markov_w1 = tensor("parallel_markov_head.markov_w1.weight")
        self.markov_w2 = tensor("parallel_markov_head.markov_w2.weight")
        queries = state["global16_raw256_reference.global_query_generator.learned_query"]
        local = config.num_attention_heads // tp_size
        self.queries = nn.Parameter(
            queries[:, tp_rank * local : (tp_rank + 1) * local]
            .to(device=device, dtype=dtype)
            .contiguous(),
            requires_grad=False,
        )
        self.slot_offsets = torch.arange(config.num_draft_tokens, device=device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of drafter weights on this rank."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    @torch.no_grad()
    def propose(
        self,
        anchors: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        positions: torch.Tensor,
        store: SummaryStore,
        req_to_token: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
    ) -> Proposal:
        """Draft `num_drafts` tokens for each request.

        Args:
            anchors: [B] int64, the token at position seq_len (its K/V is not cached yet).
            rows: [B] int64 request pool rows; seq_lens: [B] int64 committed rows.
            temperature: [B] float32, 0 = greedy.
            seed, positions: [B] int64; slot j draws with the noise of (seed, position + j).
            store: summary and boundary state; key_pools, value_pools: one per tapped layer.
        """
        config = self.config
        window_rows, window_lens = window_index(req_to_token, rows, seq_lens, config.window)
        hidden = self._block_inputs(anchors, store.boundary[rows])
        cos, sin = self._rope_tables(seq_lens, hidden.dtype)
        for i, layer in enumerate(self.layers):

            def attend(q, k, v, i=i):
                return block_attention(
                    q,
                    self.queries[i],
                    store.value[:, i],
                    rows,
                    key_pools[i],
                    value_pools[i],
                    window_rows,
                    window_lens,
                    k,
                    v,
                    store.scale,
                )

            hidden = layer(hidden, cos, sin, attend)
        base_logits = self._base_logits(hidden[:, : self.num_drafts])
        return self._draw(base_logits, anchors, temperature, seed, positions)

    def _block_inputs(self, anchors: torch.Tensor, boundary: torch.Tensor) -> torch.Tensor:
        """Sections 3.1 and 3.2: [B], [B, L, h] -> [B, K, h]."""
        config = self.config
        batch, slots = anchors.shape[0], config.num_draft_tokens
        fused = F.linear(F.silu(F.linear(boundary.flatten(1), self.boundary_in)), self.boundary_out)
        context = hf_rms_norm(fused, self.boundary_norm, config.qwen_rms_norm_eps)
        ids = anchors.new_full((batch, slots), config.mask_token)
        ids[:, 0] = anchors
        embedded = self.target.model.embed_tokens(ids.flatten()).view(batch, slots, -1)
        tokens = embedded + self.slot_embedding
        both = torch.cat((tokens, context[:, None].expand_as(tokens)), dim=-1)
        mapped = F.linear(F.silu(F.linear(both, self.input_in)), self.input_out)
        return hf_rms_norm(mapped, self.input_norm, config.qwen_rms_norm_eps)

    def _rope_tables(
        self, seq_lens: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at positions L .. L+K-1, [B, K, 1, d/2], out of the target's own table."""
        table = self.rope.cos_sin_cache
        # Slots past the table belong to drafts past the context limit, which are never kept.
        positions = (seq_lens[:, None] + self.slot_offsets).clamp(max=table.shape[0] - 1)
        cos, sin = table[positions].to(dtype).chunk(2, dim=-1)
        return cos.unsqueeze(2), sin.unsqueeze(2)

    def _base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Section 3.5: [B, k, h] -> [B, k, V] through the target's norm and head."""
        batch, slots, width = hidden.shape
        normed = self.target.model.norm(hidden.reshape(-1, width))
        processor = self.target.logits_processor
        logits = processor._compute_lm_head(normed, self.target.lm_head)
        if processor.do_tensor_parallel_all_gather:
            logits = tensor_model_parallel_all_gather(logits)
        return logits[:, : self.vocab_size].view(batch, slots, -1)

    def _draw(
        self,
        base_logits: torch.Tensor,
        anchors: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        positions: torch.Tensor,
    ) -> Proposal:
        """Section 3.6: slot after slot, each corrected by the token before it."""
        previous, tokens, logqs = anchors, [], []
        for slot in range(self.num_drafts):
            previous, logq = draft_sample(
                base_logits[:, slot],
                previous,
                self.markov_w1,
                self.markov_w2,
                temperature,
                seed,
                positions + slot,
                self.vocab_size,
            )
            tokens.append(previous)
            logqs.append(logq)
        return Proposal(torch.stack(tokens, 1), torch.stack(logqs, 1), base_logits)


def _rotary_module(target: Any, config: LongSparkConfig) -> Any:
    """The RoPE module of the first tapped layer, or an error that says what does not fit."""
    attention = target.model.layers[config.tapped_layers[0]].self_attn
    rope = getattr(attention, "rotary_emb", None)
    table = getattr(rope, "cos_sin_cache", None)
    if table is None or table.shape[-1] != config.head_dim:
        raise ValueError(
            "the target's attention has no full-width RoPE table (partial or no rotation); "
            "LONGSPARK needs rotate-half RoPE over the whole head"
        )
    if not getattr(rope, "is_neox_style", True):
        raise ValueError("the target rotates interleaved pairs; LONGSPARK needs rotate-half RoPE")
    return rope
