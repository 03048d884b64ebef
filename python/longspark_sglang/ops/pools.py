"""Reading rows of a K/V pool by row id (plain torch).

A pool of one layer is [N, Hkv, d] (row id t) or paged [pages, P, Hkv, d] (row id t = page * P +
offset). FlashInfer's HND layout [pages, Hkv, P, d] is passed as its permuted view.
"""

import torch


def pool_rows(pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy of the rows `rows` (any shape, integer) of `pool`: [*rows.shape, Hkv, d]."""
    rows = rows.long()
    if pool.dim() == 3:
        return pool[rows]
    page_size = pool.size(1)
    return pool[rows // page_size, rows % page_size]
