"""The one table of SGLang functions this platform stands in for, and the check that it holds."""

from __future__ import annotations

import pkgutil
from typing import NamedTuple

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class Hook(NamedTuple):
    """`target` of SGLang is hooked with `ours`, a "module:function" of this package."""

    target: str
    type: HookType
    ours: str
    why: str


_REPLACE, _AROUND, _AFTER = HookType.REPLACE, HookType.AROUND, HookType.AFTER

HOOKS = (
    Hook(
        "torch.Tensor.record_stream",
        _AROUND,
        "streams:record_stream",
        "raises for a CPU tensor; the overlap scheduler calls it for every device",
    ),
    Hook(
        "sglang.srt.utils.numa_utils.init_threads_binding",
        _AROUND,
        "threads:init_threads_binding",
        "asserts when there are more ranks than NUMA nodes, so --tp 2 would need a variable set",
    ),
    Hook(
        "sglang.srt.layers.sampler.multinomial_with_seed",
        _REPLACE,
        "sampling:multinomial_with_seed",
        "hashes in sgl-kernel on a CPU tensor, and is compiled with torch.compile at first use",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        _REPLACE,
        "slots:assign_req_to_token",
        "a Triton kernel; every speculative decode step reserves slots with it",
    ),
)


def install() -> None:
    """Hand the hooks to SGLang, which applies them after all plugins have loaded."""
    for hook in HOOKS:
        ours = pkgutil.resolve_name(f"longspark_cpu_platform.{hook.ours}")
        HookRegistry.register(hook.target, ours, hook.type)
    register_attention_backend("torch_native")(_attention_backend)


def _attention_backend(model_runner: object) -> object:
    from longspark_cpu_platform.attention_backend import CpuAttentionBackend

    return CpuAttentionBackend(model_runner)


def assert_applied() -> None:
    """Raise RuntimeError naming every hook that is not in force.

    SGLang logs a failing plugin or hook and goes on, which would surface much later as a crash in
    Triton.
    """
    missing = [hook for hook in HOOKS if hook.target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            "the CPU platform's hooks are not in force: "
            + "; ".join(f"{hook.target} ({hook.why})" for hook in missing)
            + ". Either SGLang's log above says why, or SGLANG_PLUGINS leaves out 'longspark_cpu', "
            "or this is not sglang 0.5.23."
        )
