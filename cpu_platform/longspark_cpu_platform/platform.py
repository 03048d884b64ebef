"""What SGLang asks a platform for, answered for a plain CPU box.

SGLang imports this file in the middle of its own import, so nothing at the top may import more of
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from longspark_cpu_platform.names import (
    ATTENTION_BACKEND,
    SPECULATIVE_ALGORITHMS,
    TREE_ALGORITHMS,
)
from longspark_cpu_platform.slots import extend_cache_locs


class LongSparkCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain-torch CPU platform. OOT, not CPU: in-tree, CPU means "has sgl-kernel operators"."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        # A string, because ServerArgs compares its device with "cpu".
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Called while the main process resolves its arguments; may raise, unlike a plugin."""
        from longspark_cpu_platform import hooks

        hooks.assert_applied()
        algorithm = (server_args.speculative_algorithm or "").upper()
        if algorithm in TREE_ALGORITHMS:
            # SGLang does not ask `supports_speculative_algorithm` about these.
            raise ValueError(
                f"{algorithm} verifies trees of drafts, which the CPU platform does not; "
                f"use one of {', '.join(SPECULATIVE_ALGORITHMS)} or a plugin's algorithm"
            )
        # SGLang has filled "intel_amx" in before it asks us, so None alone is not enough to test.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        # The scheduler polls in a busy loop otherwise, which takes a core from whatever else runs.
        server_args.sleep_on_idle = True

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from longspark_cpu_platform.kv_pool import CpuKVPool

        return CpuKVPool

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return extend_cache_locs

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
