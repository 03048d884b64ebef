"""Shapes and dtypes of the compiled operators' results, for torch.compile and torch.export.

One function per operator, with the operator's own arguments, registered when the extension is
loaded.
"""

from typing import Any

import torch


def _window_index(req_to_token, req_rows, seq_lens, window):
    batch = seq_lens.size(0)
    return (
        req_to_token.new_empty(batch, window, dtype=torch.int32),
        req_to_token.new_empty(batch, dtype=torch.int32),
    )


def _window_index_paged(kv_indptr, kv_indices, kv_last_page_len, page_size, window):
    return _window_index(kv_indices, None, kv_last_page_len, window)


def _nothing(*arguments):
    return None


def _block_attention(query, *arguments):
    return query.new_empty(query.shape)


def _markov_step(base_logits, prev, markov_w1, markov_w2):
    return base_logits.new_empty(base_logits.shape, dtype=torch.float32)


def _draft_sample(base_logits, prev, *arguments):
    return torch.empty_like(prev), base_logits.new_empty(prev.shape, dtype=torch.float32)


def _accept_chain(target_probs, draft_tokens, *arguments):
    batch = draft_tokens.size(0)
    return draft_tokens.new_empty(batch, dtype=torch.int32), draft_tokens.new_empty(batch)


_FAKES: dict[str, Any] = {
    "window_index": _window_index,
    "window_index_paged": _window_index_paged,
    "window_gather": _nothing,
    "summary_merge": _nothing,
    "summary_merge_bulk": _nothing,
    "block_attention": _block_attention,
    "markov_step": _markov_step,
    "draft_sample": _draft_sample,
    "accept_chain": _accept_chain,
    "accept_greedy": _accept_chain,
}


def register(namespace: str) -> None:
    """Register the fakes of every operator in `torch.ops.<namespace>`."""
    for op, fake in _FAKES.items():
        torch.library.register_fake(f"{namespace}::{op}", fake)
