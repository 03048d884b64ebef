"""Torch versions of SGLang's Triton look-ups and writes in `req_to_token`.

`req_to_token` is [request rows, max context] int32: cell (r, p) is the KV slot of position p of the
request in row r. Offsets and rows may be int32 or int64.
"""

from __future__ import annotations

from typing import Any

import torch


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **_: Any,
) -> torch.Tensor:
    """Slots of positions start[b] .. start[b]+draft_token_num-1 of each request, [B*n] int64.

    Stands in for kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func, which returns
    None on a device it does not know. SGLang offers a platform method for exactly this one.
    """
    steps = torch.arange(draft_token_num, device=req_to_token.device)
    positions = start_offset.long()[:, None] + steps
    return req_to_token[req_pool_indices.long()[:, None], positions].reshape(-1).long()


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write the new slots (ragged, flat in `out_cache_loc`) into cells start[b] .. end[b]-1.

    Stands in for mem_cache.allocation.assign_req_to_token_pool_func, a Triton kernel.
    """
    slots = out_cache_loc.to(req_to_token.dtype)
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        req_to_token[row, start:end] = slots[taken : taken + end - start]
        taken += end - start
