"""The one table of SGLang functions this platform stands in for, and the check that it holds."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any, NamedTuple

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from longspark_cpu_platform.names import ATTENTION_BACKEND


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
        "torch.get_device_module",
        _AROUND,
        "streams:device_module",
        "is torch.cuda on a CUDA build of torch, driver or not: /release_memory_occupation dies",
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
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        _AROUND,
        "sampling:filter_min_p_before_seeded_draw",
        "asserts on min-p with a seed, which ends the scheduler",
    ),
    Hook(
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        _REPLACE,
        "sampling:enable_batch_invariant_mode",
        "puts a Triton kernel in place of torch.bmm",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        _REPLACE,
        "slots:assign_req_to_token",
        "a Triton kernel; every speculative decode step reserves slots with it",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        _AFTER,
        "dflash:keep_embedding_dtype",
        "casts a float32 DFLASH draft's embeddings to bfloat16",
    ),
    Hook(
        "sglang.kernels.ops.attention.table_qk_norm_rope.table_qk_norm_rope_",
        _REPLACE,
        "rope:table_qk_norm_rope_",
        "a Triton kernel; every bfloat16 DFLASH or DSPARK draft",
    ),
    Hook(
        "sglang.srt.models.dspark.DSparkDraftMixin._fused_kv_write_layout",
        _REPLACE,
        "dflash:no_fused_kv_write",
        "leads every bfloat16 DSPARK draft to a Triton kernel",
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_dspark",
        _AROUND,
        "dflash:handle_dspark",
        "refuses DSPARK by device name without asking the platform",
    ),
    Hook(
        "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
        _REPLACE,
        "rejection:chain_speculative_sampling",
        "a Triton kernel; DSPARK at temperature > 0",
    ),
    Hook(
        "sglang.kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func",
        _REPLACE,
        "eagle:assign_draft_cache_locs",
        "a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.speculative.cache_locs.fill_front_out_cache_loc_func",
        _REPLACE,
        "eagle:fill_front_out_cache_loc",
        "a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.speculative.eagle.fill_accept_out_cache_loc_func",
        _REPLACE,
        "eagle:fill_accept_out_cache_loc",
        "a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func",
        _REPLACE,
        "eagle:fill_bonus_tokens",
        "a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras",
        _REPLACE,
        "eagle:gather_spec_extras",
        "a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func",
        _REPLACE,
        "eagle:build_tree",
        "refuses an out-of-tree platform",
    ),
    Hook(
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        _REPLACE,
        "eagle:verify_tree_greedy",
        "refuses an out-of-tree platform",
    ),
    Hook(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        _AROUND,
        "eagle:create_draft_backend",
        "knows in-tree attention backends only",
    ),
)

# Kernels that SGLang leaves at None off the GPU. HookRegistry must not be used for these: it would
# replace every None of every module, as it propagates a hook by object identity.
GAPS = {
    "sglang.kernels.ops.speculative.verify_sampling.tree_speculative_sampling_target_only": (
        "rejection:tree_speculative_sampling_target_only"
    ),
    "sglang.kernels.ops.sampling.renorm.top_k_renorm_prob": "filters:top_k_renorm_prob",
    "sglang.kernels.ops.sampling.renorm.top_p_renorm_prob": "filters:top_p_renorm_prob",
}


def install() -> None:
    """Hand the hooks to SGLang, which applies them after all plugins have loaded."""
    for hook in HOOKS:
        HookRegistry.register(hook.target, _ours(hook.ours), hook.type)
    for target, ours in GAPS.items():
        _fill(target, _ours(ours))
    register_attention_backend(ATTENTION_BACKEND)(_attention_backend)
    # A block draft takes a backend only if it is on the first list. Seeds are honoured in
    # deterministic mode only, which wants a backend whose result for a request does not depend on
    # the rest of the batch: ours computes each request by itself.
    choices.add_draft_attention_backend_choices([ATTENTION_BACKEND])
    choices.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])


def _ours(name: str) -> Any:
    return pkgutil.resolve_name(f"longspark_cpu_platform.{name}")


def _fill(target: str, ours: Any) -> None:
    """Set the name where it is defined, and wherever it was already imported from there as None."""
    home, name = target.rsplit(".", 1)
    importlib.import_module(home)
    for module in _sglang_modules_with(name):
        if getattr(module, name) is None:
            setattr(module, name, ours)
    dflash = sys.modules.get("sglang.srt.speculative.dflash_utils")
    if dflash is not None:
        # Computed from the None at import; without it DFLASH verifies greedily at any temperature.
        dflash._DFLASH_SAMPLING_VERIFY_AVAILABLE = True  # type: ignore[attr-defined]


def _sglang_modules_with(name: str) -> list[Any]:
    return [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("sglang.") and name in vars(module)
    ]


def _attention_backend(model_runner: Any) -> Any:
    from longspark_cpu_platform.attention_backend import CpuAttentionBackend

    return CpuAttentionBackend(model_runner)


def assert_applied() -> None:
    """Raise RuntimeError naming every hook that is not in force.

    SGLang logs a failing plugin or hook and goes on, which would surface much later as a crash in
    Triton, or as greedy output at temperature 1.
    """
    missing = [
        f"{hook.target} ({hook.why})" for hook in HOOKS if hook.target not in HookRegistry._patched
    ]
    for target in GAPS:
        name = target.rsplit(".", 1)[1]
        missing += [
            f"{module.__name__}.{name} (None off the GPU)"
            for module in _sglang_modules_with(name)
            if getattr(module, name) is None
        ]
    dflash = sys.modules.get("sglang.srt.speculative.dflash_utils")
    if dflash is not None and not dflash.is_dflash_sampling_verify_available():
        missing.append("DFLASH's sampling verify (would be greedy at any temperature)")
    if missing:
        raise RuntimeError(
            "the CPU platform's hooks are not in force: "
            + "; ".join(missing)
            + ". Either SGLang's log above says why, or SGLANG_PLUGINS leaves out 'longspark_cpu', "
            "or this is not sglang 0.5.23."
        )
