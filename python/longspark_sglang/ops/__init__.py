"""LongSpark's operators: public functions with a plain-torch reference beside each.

Importing this package needs neither a compiler, the compiled extension, CUDA nor sglang; see
`dispatch` for which implementation of an operator runs.
"""

from .accept_chain import accept_chain, accept_greedy
from .block_attention import block_attention
from .checks import ArgumentError
from .dispatch import BackendError, sources
from .draft_sample import draft_sample
from .gumbel import gumbel_noise
from .markov_step import markov_step
from .paged_attention import paged_attention
from .summary_merge import summary_merge, summary_merge_bulk
from .window_gather import window_gather, window_index, window_index_paged

__all__ = [
    "ArgumentError",
    "BackendError",
    "accept_chain",
    "accept_greedy",
    "block_attention",
    "draft_sample",
    "gumbel_noise",
    "markov_step",
    "paged_attention",
    "sources",
    "summary_merge",
    "summary_merge_bulk",
    "window_gather",
    "window_index",
    "window_index_paged",
]
