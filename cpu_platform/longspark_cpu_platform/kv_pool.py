"""The KV pool of this platform: SGLang's own, without its Triton row mover."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """MHATokenToKVPool that moves rows by torch indexing.

    Any speculative algorithm asks for the tiled row mover, whose warm-up launches a Triton kernel.
    """

    def __init__(self, *args: Any, enable_kv_cache_copy: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, enable_kv_cache_copy=False, **kwargs)
        self.use_native_move_kv_cache = True
