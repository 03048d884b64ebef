"""The summary: a fixed number of softmax readers over all committed rows (LongSpark spec, 4).

For tapped layer l, query head n with K/V head m, and slot s, over the committed rows i:

    score_i = <G[l, n, s], K_i> / sqrt(d)
    lse     = ln sum_i exp(score_i)                (the log-normaliser, natural logarithm)
    value   = sum_i exp(score_i - lse) V_i

The empty state is value 0, lse -inf. Both are float32 (float64 for float64 rows). States of
disjoint row sets merge exactly, so any split of the rows gives the same state up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter.parts import wide_dtype

# Rows scored at a time: bounds the memory of a long prefix.
CHUNK_ROWS = 2048


class SummaryQueries(nn.Module):
    """The learned queries G [L, Hq, R, d]; they are also the keys under which summaries are read.

    In the config's "fixed_equicorrelated" mode they are a frozen bank instead.
    """

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__()
        shape = (
            config.num_layers,
            config.num_attention_heads,
            config.summary_slots,
            config.head_dim,
        )
        # Two levels only because the checkpoint names the tensor so.
        self.global_query_generator = nn.Module()
        self.global_query_generator.learned_query = nn.Parameter(
            torch.empty(shape), requires_grad=config.global_query_mode == "learned"
        )

    @property
    def weight(self) -> torch.Tensor:
        """G [L, Hq, R, d]."""
        query = self.global_query_generator.learned_query
        assert isinstance(query, torch.Tensor)
        return query


def equicorrelated_bank(config: LongSparkConfig) -> torch.Tensor:
    """A frozen query bank [L, Hq, R, d]: unit rows, any two of a head with the cosine rho.

    Deterministic. The release fixes only the Gram matrix of each head's rows,
    (1 - rho) I + rho 11^T; a Cholesky factor has it, and a rotation per head keeps it.
    """
    slots, dim = config.summary_slots, config.head_dim
    rho = config.global_query_equicorrelation
    # On the CPU whatever the default device is, so that a drafter can be built on "meta".
    with torch.device("cpu"):
        gram = torch.full((slots, slots), rho, dtype=torch.float64).fill_diagonal_(1.0)
        rows = torch.zeros(slots, dim, dtype=torch.float64)
        rows[:, :slots] = torch.linalg.cholesky(gram)
        heads = (config.num_layers, config.num_attention_heads)
        generator = torch.Generator().manual_seed(0)
        gaussian = torch.randn(*heads, dim, dim, dtype=torch.float64, generator=generator)
        return (rows @ torch.linalg.qr(gaussian).Q).float()


def merge(
    value: torch.Tensor, lse: torch.Tensor, value2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state over the union of two disjoint row sets.

    Args:
        value, value2: [..., d].
        lse, lse2: [...], natural logarithm, -inf for an empty set.
    """
    top = torch.maximum(lse, lse2).detach()
    top = torch.where(top == -math.inf, 0.0, top)  # both empty: -inf - -inf would be NaN
    weight, weight2 = (lse - top).exp(), (lse2 - top).exp()
    total = weight + weight2
    # Divided by the sum rather than weighted by exp(lse - merged): a log-normaliser near 10 is
    # rounded by 5e-7, and all values would inherit that.
    joined = weight[..., None] * value + weight2[..., None] * value2
    return joined / torch.where(total > 0, total, 1.0)[..., None], top + total.log()


def summary_of(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state over N rows from scratch; differentiable in all arguments.

    Args:
        queries: [L, Hq, R, d].
        keys, values: [..., L, N, Hkv, d], as the target cached them; N may be 0.
    Returns:
        value [..., L, Hq, R, d] and lse [..., L, Hq, R], float32 (float64 for float64 rows).
    """
    dtype = wide_dtype(keys)
    layers, heads, slots, dim = queries.shape
    kv_heads = keys.size(-2)
    batch = keys.shape[:-4]
    # Query heads of one K/V head side by side, so that the K/V rows are not repeated.
    grouped = queries.to(dtype).reshape(layers, kv_heads, heads // kv_heads * slots, dim)
    value = grouped.new_zeros(*batch, *grouped.shape)
    lse = grouped.new_full(value.shape[:-1], -math.inf)
    for key_rows, value_rows in zip(
        keys.split(CHUNK_ROWS, dim=-3), values.split(CHUNK_ROWS, dim=-3), strict=True
    ):
        if key_rows.size(-3) == 0:
            break
        # [..., L, Hkv, d, n] and [..., L, Hkv, n, d]
        scores = grouped @ key_rows.to(dtype).movedim(-3, -1) / math.sqrt(dim)
        chunk_value = scores.softmax(-1) @ value_rows.to(dtype).transpose(-3, -2)
        value, lse = merge(value, lse, chunk_value, scores.logsumexp(-1))
    return (
        value.reshape(*batch, layers, heads, slots, dim),
        lse.reshape(*batch, layers, heads, slots),
    )
