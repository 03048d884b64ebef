"""Torch versions of what in-tree EAGLE/EAGLE3 does in Triton or CUDA, for chains (topk = 1).

B requests, n = verify width. All outputs are written in place into the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longspark_cpu_platform.names import ATTENTION_BACKEND


def assign_draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Slots of the positions that the draft steps will write, from seq_lens[b] on.

    Stands in for kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func.
    """
    if positions is not None or mrope is not None:
        raise NotImplementedError("draft positions are only prepared by the GPU path")
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_cols)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc.view(seq_lens.numel(), -1).copy_(slots)


def fill_front_out_cache_loc(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """Pack the first num_front[b] slots of each request's window, one request after the other.

    Stands in for kernels.ops.speculative.cache_locs.fill_front_out_cache_loc_func.
    """
    window = out_cache_loc.view(num_front.numel(), -1)
    kept = window[torch.arange(window.shape[1]) < num_front[:, None]]
    front_out_cache_loc[: kept.numel()] = kept.to(front_out_cache_loc.dtype)


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """Pack the slots of the accepted rows (accept_index >= 0) to the front.

    Stands in for kernels.ops.speculative.eagle.fill_accept_out_cache_loc_func.
    """
    rows = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: rows.numel()] = out_cache_loc[rows].to(accept_out_cache_loc.dtype)


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """The last accepted token of each request; accept_tokens is [B * accept_stride].

    Stands in for kernels.ops.speculative.eagle.fill_bonus_tokens_func.
    """
    table = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(table[torch.arange(batch_size), accept_lens.long() - 1])


def gather_spec_extras(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows `indices` of each relay buffer.

    Stands in for kernels.ops.speculative.gather_spec_extras.gather_spec_extras.
    """
    hidden = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden


def build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """A chain: row j follows row j-1. The mask is left alone, as our attention is causal by itself.

    Trees (topk > 1) were refused when the draft's backend was created.

    Stands in for kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func.
    """
    requests, column = seq_lens.numel(), torch.arange(num_verify_tokens)
    positions.view(requests, -1).copy_(seq_lens[:, None] + column)
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.copy_((column + 1).expand_as(retrieve_next_token))
    retrieve_next_token[:, -1] = -1
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the chain while it agrees with the target's argmax [B, n].

    Stands in for kernels.ops.speculative.spec_tree.verify_tree_greedy_func.
    """
    agrees = (candidates[:, 1:] == target_predict[:, :-1]).int()
    accepted = agrees.cumprod(1).sum(1)
    taken = torch.arange(accept_index.shape[1]) <= accepted[:, None]
    flat = retrieve_index[:, : accept_index.shape[1]].to(accept_index.dtype)
    accept_index.copy_(torch.where(taken, flat, -1))
    predicts[retrieve_index.reshape(-1).long()] = target_predict.reshape(-1).to(predicts.dtype)
    accept_token_num.copy_(accepted)
    return predicts, accept_index, accept_token_num


class ChainDraftBackends:
    """One attention backend per draft step, as EAGLE's draft loop wants it."""

    def __init__(self, model_runner: Any, steps: int) -> None:
        from longspark_cpu_platform.attention_backend import CpuAttentionBackend

        self.attn_backends = [
            CpuAttentionBackend(model_runner, steps_ahead=step + 1) for step in range(steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def create_draft_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Put our backend on the list that in-tree drafts choose from.

    Stands in for srt.speculative.draft_utils.DraftBackendFactory._create_backend, whose lists are
    closed. `stamps_children` is SGLang's word for the multi-step decode container. The first place
    where the number of branches is final, so trees are refused here, while the server starts.
    """
    if factory.topk != 1:
        raise NotImplementedError(
            f"EAGLE trees (here topk {factory.topk}) need a GPU; give --speculative-eagle-topk 1 "
            "--speculative-num-steps N --speculative-num-draft-tokens N+1"
        )

    def make() -> tuple[str, Any]:
        from longspark_cpu_platform.attention_backend import CpuAttentionBackend

        runner = factory.draft_model_runner
        if stamps_children:
            return ATTENTION_BACKEND, ChainDraftBackends(runner, factory.speculative_num_steps)
        return ATTENTION_BACKEND, CpuAttentionBackend(runner)

    choices = {**backend_map, ATTENTION_BACKEND: make}
    return original(factory, backend_name, choices, error_template, stamps_children)
