"""The window: the last W committed rows of each request in the target's K/V pools.

`window_index` and `window_index_paged` turn SGLang's or FlashInfer's addressing into a list of row
ids, so that attention reads the rows in place; `window_gather` copies them into a contiguous ring,
which is needed only where the drafter doesn't see the target's memory.

All results are bitwise the same for every backend.
"""

from collections.abc import Sequence

import torch

from . import dispatch
from .checks import FLOATS, Checker
from .pools import pool_rows

_INTS = (torch.int32, torch.int64)


def window_index(
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row ids of each request's last committed rows, from SGLang's request-to-token table.

    Args:
        req_to_token: [requests, width] int32, row id of each position of each request row.
        req_rows: [B] int64, the request row of each batch entry.
        seq_lens: [B] int64, number of committed rows; at most `width`.
        window: W, the most rows returned per request.
    Returns:
        rows [B, W] int32 in position order (the unused tail is 0) and lens [B] int32 =
        min(seq_len, W). Nothing at or after position seq_len is read.
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("window_index", req_to_token.device)
    check.tensor("req_to_token", req_to_token, "requests width", torch.int32)
    check.tensor("req_rows", req_rows, "B", torch.int64)
    check.tensor("seq_lens", seq_lens, "B", torch.int64)
    check.condition(window >= 1, f"window must be at least 1, not {window}")
    check.finish()
    run = dispatch.resolve("window_index", req_to_token.device, backend)
    return run(req_to_token, req_rows, seq_lens, window)


@dispatch.reference("window_index")
def window_index_reference(
    req_to_token: torch.Tensor, req_rows: torch.Tensor, seq_lens: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    lens = seq_lens.clamp(min=0, max=window)
    column = torch.arange(window, device=seq_lens.device)
    used = column < lens[:, None]
    position = torch.where(used, (seq_lens - lens)[:, None] + column, 0)
    if req_to_token.numel() == 0:
        return torch.zeros_like(used, dtype=torch.int32), lens.int()
    rows = req_to_token[req_rows[:, None], position]
    return torch.where(used, rows, 0), lens.int()


def window_index_paged(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    window: int,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `window_index`, from FlashInfer's page table.

    Args:
        kv_indptr: [B+1] int32, where each request's pages start in `kv_indices`.
        kv_indices: [pages used] int32, page ids in position order.
        kv_last_page_len: [B] int32, rows used in each request's last page (1..page_size; ignored
            for a request without pages, which has 0 rows).
        page_size: rows per page.
        window: W.
    Returns:
        rows [B, W] int32 (page * page_size + offset) and lens [B] int32, as `window_index`.
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("window_index_paged", kv_indptr.device)
    check.tensor("kv_last_page_len", kv_last_page_len, "B", torch.int32)
    check.tensor("kv_indptr", kv_indptr, "B+1", torch.int32)
    check.tensor("kv_indices", kv_indices, "pages", torch.int32)
    check.condition(page_size >= 1, f"page_size must be at least 1, not {page_size}")
    check.condition(window >= 1, f"window must be at least 1, not {window}")
    check.finish()
    run = dispatch.resolve("window_index_paged", kv_indptr.device, backend)
    return run(kv_indptr, kv_indices, kv_last_page_len, page_size, window)


@dispatch.reference("window_index_paged")
def window_index_paged_reference(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    first_page = kv_indptr[:-1].long()
    pages = kv_indptr[1:].long() - first_page
    seq_lens = torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len.long(), 0)
    lens = seq_lens.clamp(max=window)
    column = torch.arange(window, device=kv_indptr.device)
    used = column < lens[:, None]
    position = torch.where(used, (seq_lens - lens)[:, None] + column, 0)
    if kv_indices.numel() == 0:
        return torch.zeros_like(used, dtype=torch.int32), lens.int()
    entry = torch.where(used, first_page[:, None] + position // page_size, 0)
    rows = kv_indices[entry] * page_size + position.int() % page_size
    return torch.where(used, rows, 0), lens.int()


def window_gather(
    key_pools: Sequence[torch.Tensor],
    value_pools: Sequence[torch.Tensor],
    rows: torch.Tensor,
    lens: torch.Tensor,
    seq_lens: torch.Tensor,
    out_key: torch.Tensor,
    out_value: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Copy the windows of all tapped layers and requests into rings.

    The row of position p goes to ring slot p mod W; ring slots that no row of this call maps to
    stay as they are. So a later call with only the new rows (lens = number of new rows, the last
    positions before seq_lens) advances the ring.

    Args:
        key_pools, value_pools: one pool per tapped layer, [N, Hkv, d] or [pages, P, Hkv, d].
        rows: [B, W] int32, row ids in position order; entries from lens[b] on are ignored.
        lens: [B] int32, 0..W.
        seq_lens: [B] int64, position after the last listed row.
        out_key, out_value: [L, B, W, Hkv, d], the pools' dtype; written.
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("window_gather", rows.device)
    check.pools(key_pools, value_pools, FLOATS)
    check.tensor("rows", rows, "B W", torch.int32)
    check.tensor("lens", lens, "B", torch.int32)
    check.tensor("seq_lens", seq_lens, "B", torch.int64)
    dtype = key_pools[0].dtype if len(key_pools) else out_key.dtype
    check.tensor("out_key", out_key, "L B W Hkv d", dtype)
    check.tensor("out_value", out_value, "L B W Hkv d", dtype)
    check.finish()
    run = dispatch.resolve("window_gather", rows.device, backend)
    run(key_pools, value_pools, rows, lens, seq_lens, out_key, out_value)


@dispatch.reference("window_gather")
def window_gather_reference(
    key_pools: Sequence[torch.Tensor],
    value_pools: Sequence[torch.Tensor],
    rows: torch.Tensor,
    lens: torch.Tensor,
    seq_lens: torch.Tensor,
    out_key: torch.Tensor,
    out_value: torch.Tensor,
) -> None:
    batch, window = rows.shape
    if batch == 0 or window == 0:
        return
    # Asking "which row belongs in this ring slot" instead of "where does this row go" leaves no
    # masked scatter, hence no read of `lens` by the host.
    first = seq_lens - lens
    ring_slot = torch.arange(window, device=rows.device)
    column = (ring_slot - first[:, None]) % window
    used = (column < lens[:, None])[:, :, None, None]
    source = torch.where(used[:, :, 0, 0], rows.gather(1, column), 0)
    for layer, (key_pool, value_pool) in enumerate(zip(key_pools, value_pools, strict=True)):
        out_key[layer] = torch.where(used, pool_rows(key_pool, source), out_key[layer])
        out_value[layer] = torch.where(used, pool_rows(value_pool, source), out_value[layer])
