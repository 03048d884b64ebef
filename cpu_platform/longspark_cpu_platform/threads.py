"""How the ranks of a tensor-parallel CPU server share the cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def init_threads_binding(
    original: Callable[..., object], *, numa_index: int, world_size: int
) -> object:
    """Give each rank an equal, disjoint share of this process's cores.

    Stands in for utils.numa_utils.init_threads_binding, which asserts unless there is a NUMA node
    per rank or SGLANG_CPU_OMP_THREADS_BIND is set. A user's own setting is honoured as SGLang does.
    Returns the core list as a string, which only sgl-kernel would read.
    """
    if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return original(numa_index=numa_index, world_size=world_size)
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // world_size)
    # Ranks beyond the number of cores wrap round and share.
    first = numa_index * share % len(cores)
    mine = cores[first : first + share]
    if "OMP_NUM_THREADS" not in os.environ:
        # The thread count only: pinning would fight with whatever else runs on a shared box.
        torch.set_num_threads(share)
    logger.info("rank %d of %d computes with %d thread(s)", numa_index, world_size, share)
    return ",".join(map(str, mine))
