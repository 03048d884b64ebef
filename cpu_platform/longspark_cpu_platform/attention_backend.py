"""SGLang attention backend of this platform: prefill, decode and target verify, one code path."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from longspark_cpu_platform import hooks
from longspark_cpu_platform.paged_attention import fastest


class Plan(NamedTuple):
    """Where the query rows of one forward pass sit, and what they may read."""

    req_rows: torch.Tensor  # [B] int64
    kv_lens: torch.Tensor  # [B] int64, the new rows included
    query_indptr: torch.Tensor  # [B+1] int64


class CpuAttentionBackend(AttentionBackend):
    """Reads each request's own rows of the pool and computes each query row once.

    The in-tree backend of this name pads every extend with the whole prefix as extra query rows,
    and has no target verify.

    `steps_ahead` serves EAGLE's multi-step drafting: the batch still carries the lengths of the
    last verified step while the draft's rows grow by one per step.
    """

    def __init__(self, model_runner: Any, steps_ahead: int = 0) -> None:
        super().__init__()
        # A plugin's failure is only logged by SGLang; here it stops the worker.
        hooks.assert_applied()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.pool = model_runner.token_to_kv_pool
        # Models that write their own rows ask for it by this name.
        self.token_to_kv_pool = self.pool
        self.has_swa_pool = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        self.steps_ahead = steps_ahead
        self.attend = fastest()
        self.plan: Plan | None = None
        self.swa_out_cache_loc: torch.Tensor | None = None
        self.swa_table: torch.Tensor | None = None

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        kv_lens = forward_batch.seq_lens.long()
        if mode.is_decode():
            kv_lens = kv_lens + self.steps_ahead
            query_lens = torch.ones_like(kv_lens)
        elif mode.is_target_verify():
            width = forward_batch.spec_info.draft_token_num
            kv_lens = kv_lens + width
            query_lens = torch.full_like(kv_lens, width)
        else:
            query_lens = forward_batch.extend_seq_lens.long()
        self.plan = Plan(
            forward_batch.req_pool_indices.long(),
            kv_lens,
            torch.cat([query_lens.new_zeros(1), query_lens.cumsum(0)]),
        )
        if self.has_swa_pool:
            self._plan_sliding_window(forward_batch, self.plan)

    def _plan_sliding_window(self, forward_batch: ForwardBatch, plan: Plan) -> None:
        """Sliding-window layers have a pool of their own, addressed through a translation table."""
        translate = self.pool.translate_loc_from_full_to_swa
        if forward_batch.out_cache_loc is not None:
            self.swa_out_cache_loc = translate(forward_batch.out_cache_loc)
        longest = int(plan.kv_lens.max())
        self.swa_table = translate(self.req_to_token[plan.req_rows, :longest].long()).int()

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extras)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extras)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        """q [T, Hq*d], k [T, Hkv*d], v [T, Hkv*dv] -> [T, Hq*dv]."""
        _refuse_layer(layer, extras)
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.pool.set_kv_buffer(layer, where, k, v)
        assert self.plan is not None, "init_forward_metadata was not called for this batch"
        table, rows = self.req_to_token, self.plan.req_rows
        if self.has_swa_pool and self.pool.layers_mapping[layer.layer_id][1]:
            table, rows = self.swa_table, torch.arange(rows.numel())
        out = self.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.pool.get_key_buffer(layer.layer_id),
            self.pool.get_value_buffer(layer.layer_id),
            table,
            rows,
            self.plan.kv_lens,
            self.plan.query_indptr,
            scale=layer.scaling,
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
            window=layer.sliding_window_size,
            softcap=layer.logit_cap or 0.0,
        )
        return out.view(out.shape[0], -1)


def _refuse_layer(layer: RadixAttention, extras: dict[str, Any]) -> None:
    reasons = []
    if layer.is_cross_attention:
        reasons.append("cross attention")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        reasons.append(f"logit capping by {layer.logit_capping_method!r}")
    reasons += [f"argument {name!r}" for name, value in extras.items() if value is not None]
    if reasons:
        raise NotImplementedError(
            f"the CPU attention backend does not implement {', '.join(reasons)} "
            f"(layer {layer.layer_id}); serve this model on another platform"
        )
