"""What LONGSPARK touches in SGLang, and what it refuses.

Two tables a reader can audit: `SYMBOLS` names every SGLang attribute that the serving package
calls, overrides or reads, so that a release that moved one is reported by name before weights load;
and `server_refusals` lists every server configuration that cannot be served exactly, all at once,
each with the flag to change.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from longspark_sglang.config import LongSparkConfig

ALGORITHM = "LONGSPARK"
TESTED_SGLANG = ("0.5.23",)

# The settings that an environment variable overrides; `longspark check` prints this table.
ENVIRONMENT: dict[str, str] = {
    "LONGSPARK_DISABLE": "1: do not register the algorithm (kill switch)",
    "LONGSPARK_CHECK": "k: check every round, every k rounds by recomputation (0, off)",
    "LONGSPARK_SNAPSHOT_MB": "MiB of host memory for prefix snapshots a rank (0: off; default: one "
    "for each 512 rows of the KV cache)",
    "LONGSPARK_OPS_BACKEND": "reference | cpu | cuda: force one source of operators (default auto)",
    "LONGSPARK_WARN_ROUNDS": "rounds after which an accept length of 1.0 is reported (default 200)",
}


@dataclass(frozen=True)
class Symbol:
    """One SGLang attribute: dotted module, attribute path, and the parameters we rely on.

    `use` is "call", "override", "hook" or "field": how a change of it would hurt us.
    """

    module: str
    path: str
    use: str
    parameters: tuple[str, ...] = ()


SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        "sglang.srt.speculative.spec_info",
        "SpeculativeAlgorithm.register",
        "call",
        ("name", "supports_overlap", "validate_server_args", "spec_class"),
    ),
    Symbol("sglang.srt.speculative.spec_registry", "CustomSpecAlgo.handle_server_args", "override"),
    Symbol(
        "sglang.srt.speculative.spec_registry",
        "CustomSpecAlgo.supports_grammar_overlap",
        "override",
    ),
    Symbol(
        "sglang.srt.speculative.spec_registry", "CustomSpecAlgo.supports_mixed_chunk", "override"
    ),
    Symbol(
        "sglang.srt.managers.overlap_utils",
        "FutureMap.__init__",
        "call",
        ("device", "spec_algo", "req_to_token_pool", "needs_cpu_seq_lens"),
    ),
    Symbol(
        "sglang.srt.speculative.base_spec_worker",
        "BaseSpecWorker.alloc_memory_pool",
        "override",
        ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    Symbol(
        "sglang.srt.speculative.base_spec_worker", "BaseSpecWorker.init_cuda_graphs", "override"
    ),
    Symbol(
        "sglang.srt.speculative.base_spec_worker", "BaseSpecWorker.clear_cache_pool", "override"
    ),
    Symbol(
        "sglang.srt.speculative.base_spec_worker",
        "BaseSpecWorker.on_verify_complete_cpu",
        "override",
        ("num_correct_drafts_per_req", "batch_size"),
    ),
    Symbol(
        "sglang.srt.speculative.dflash_info",
        "DFlashVerifyInput.prepare_for_verify",
        "call",
        ("batch", "target_worker"),
    ),
    Symbol(
        "sglang.srt.speculative.draft_worker_common",
        "make_draft_input_v2",
        "call",
        ("bonus_tokens", "new_seq_lens"),
    ),
    Symbol("sglang.srt.speculative.dflash_info_v2", "DFlashDraftInputV2.create_idle_input", "call"),
    Symbol(
        "sglang.srt.speculative.spec_utils",
        "build_grammar_vocab_mask",
        "call",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Symbol("sglang.srt.speculative.spec_utils", "GrammarTree.from_linear_chain", "call"),
    Symbol(
        "sglang.srt.speculative.spec_utils",
        "sample_simulated_acc_len",
        "call",
        ("simulate_acc_len", "simulate_acc_method", "max_len"),
    ),
    Symbol("sglang.srt.environ", "envs", "field"),
    Symbol("sglang.srt.layers.logprob_processor", "compute_spec_logprobs", "call"),
    Symbol(
        "sglang.srt.layers.sampler",
        "apply_custom_logit_processor",
        "call",
        ("logits", "sampling_batch_info", "num_tokens_in_batch"),
    ),
    Symbol("sglang.srt.utils.async_probe", "sanitize_nan_logits", "call"),
    Symbol("sglang.srt.sampling.sampling_params", "TOP_K_ALL", "field"),
    Symbol("sglang.srt.arg_groups.overrides", "resolving_view", "call"),
    Symbol("sglang.srt.runtime_context", "get_exec", "call"),
    Symbol("sglang.srt.runtime_context", "get_parallel", "call"),
    Symbol("sglang.srt.runtime_context", "get_schedule", "call"),
    Symbol("sglang.srt.runtime_context", "get_server_args", "call"),
    Symbol("sglang.srt.runtime_context", "get_spec", "call"),
    Symbol("sglang.srt.model_executor.forward_batch_info", "CaptureHiddenMode", "field"),
    Symbol("sglang.srt.distributed", "tensor_model_parallel_all_gather", "call"),
    Symbol("sglang.srt.layers.linear", "MergedColumnParallelLinear", "call"),
    Symbol("sglang.srt.layers.linear", "QKVParallelLinear", "call"),
    Symbol("sglang.srt.layers.linear", "RowParallelLinear", "call"),
    Symbol(
        "sglang.kernels.ops.speculative.cache_locs",
        "assign_extend_cache_locs_func",
        "call",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset"),
    ),
    Symbol(
        "sglang.srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation",
        "call",
        ("batch", "forward_batch", "is_verify"),
    ),
    Symbol("sglang.srt.managers.tp_worker", "TpModelWorker.get_decode_cuda_graph_bs", "call"),
    Symbol("sglang.srt.managers.utils", "GenerationBatchResult", "field"),
    Symbol("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_key_buffer", "call"),
    Symbol("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_value_buffer", "call"),
    Symbol("sglang.srt.mem_cache.memory_pool", "ReqToTokenPool.alloc_rows", "field"),
    Symbol("sglang.srt.layers.logits_processor", "LogitsProcessor._compute_lm_head", "call"),
    Symbol("sglang.srt.mem_cache.allocation_sizing", "get_req_to_token_extra_context_len", "hook"),
    Symbol("sglang.srt.mem_cache.allocation_sizing", "get_alloc_page_size", "call"),
    Symbol("sglang.srt.mem_cache.allocation_sizing", "get_alloc_reserve_per_decode", "call"),
    Symbol("sglang.srt.dllm.mixin.scheduler", "SchedulerDllmMixin.validate_dllm_request", "hook"),
    Symbol(
        "sglang.srt.arg_groups.speculative_hook", "_resolve_speculative_algorithm_alias", "hook"
    ),
    Symbol(
        "sglang.srt.managers.scheduler_components.internal_state",
        "SchedulerInternalStateController._add_speculative",
        "hook",
    ),
    Symbol(
        "sglang.srt.managers.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager._observe_weight_load",
        "hook",
    ),
    Symbol(
        "sglang.srt.managers.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager.begin_weight_update",
        "hook",
    ),
    Symbol("sglang.srt.managers.schedule_batch", "Req.owned_kv_len", "call"),
    Symbol("sglang.srt.managers.schedule_batch", "ReqKvInfo", "field"),
    Symbol("sglang.srt.speculative.spec_info", "create_dummy_verify_input", "hook"),
    Symbol(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.get_spec_info",
        "hook",
    ),
    Symbol("sglang.srt.plugins.hook_registry", "HookRegistry.register", "call"),
    Symbol("sglang.srt.plugins.hook_registry", "HookType", "field"),
    Symbol("sglang.srt.distributed.parallel_state", "GroupCoordinator.broadcast", "call"),
)

# Methods that the scheduler calls on every algorithm but that `CustomSpecAlgo` of 0.5.23 lacks.
ALGORITHM_ADDITIONS = ("create_future_map", "carries_draft_hidden_states", "need_topk")


def installed_sglang() -> str | None:
    """Version of the installed sglang, or None."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def missing_symbols() -> list[str]:
    """Every entry of `SYMBOLS` that this SGLang lacks or has with other parameters, in words."""
    problems = []
    for symbol in SYMBOLS:
        name = f"{symbol.module}.{symbol.path}"
        try:
            found: Any = importlib.import_module(symbol.module)
            for part in symbol.path.split("."):
                found = getattr(found, part)
        except Exception as error:  # an import of SGLang may fail in many ways (a broken driver)
            problems.append(f"{name} is gone ({error})")
            continue
        if symbol.parameters:
            have = inspect.signature(found).parameters
            lacking = [p for p in symbol.parameters if p not in have]
            if lacking:
                problems.append(f"{name} has no parameter {', '.join(lacking)}")
    return problems


def environment_problems() -> list[str]:
    """Why this installation cannot serve LONGSPARK at all: version and symbol mismatches."""
    have = installed_sglang()
    if have is None:
        return ["sglang is not installed: pip install 'longspark-sglang[sglang]'"]
    problems = missing_symbols()
    if problems and have not in TESTED_SGLANG:
        problems.insert(
            0,
            f"sglang {have} is not a tested release; install sglang=={TESTED_SGLANG[-1]}",
        )
    return problems


def server_refusals(args: Any) -> list[str]:
    """Reasons why LONGSPARK cannot serve these server arguments, each with what to change.

    `args` is SGLang's ServerArgs (or any object with its fields; absent fields count as unset).
    """

    def get(name: str, default: Any = None) -> Any:
        return getattr(args, name, default)

    reasons = []

    def refuse(condition: Any, reason: str) -> None:
        if condition:
            reasons.append(reason)

    refuse(
        not get("speculative_draft_model_path"),
        "no drafter was named: add --speculative-draft-model-path <folder or hub id>",
    )
    refuse(
        (get("pp_size") or 1) > 1,
        "pipeline parallelism: the tapped layers must live on one rank; use --pp-size 1",
    )
    refuse(
        # SGLang rewrites the first spelling into the second before it asks us.
        get("enable_dp_attention") or (get("attn_dp_size") or 1) > 1,
        "DP attention is not supported yet; drop --enable-dp-attention (use --attn-dp-size 1)",
    )
    refuse(
        (get("attn_cp_size") or 1) > 1 or (get("dcp_size") or 1) > 1,
        "context parallelism splits the K/V rows that the drafter reads; use size 1",
    )
    refuse(
        (get("disaggregation_mode") or "null") != "null",
        "prefill/decode disaggregation is not supported yet; drop --disaggregation-mode",
    )
    kv_dtype = str(get("kv_cache_dtype") or "auto")
    refuse(
        kv_dtype not in ("auto", "bf16", "bfloat16", "float16", "fp16", "float32", "fp32"),
        f"a quantised KV cache ({kv_dtype}) cannot be read in place; use --kv-cache-dtype auto",
    )
    refuse(
        (get("speculative_eagle_topk") or 1) != 1,
        "LONGSPARK drafts a chain; use --speculative-eagle-topk 1 or leave it out",
    )
    refuse(
        (get("speculative_num_steps") or 1) != 1,
        "LONGSPARK drafts in one step; leave --speculative-num-steps out "
        "(--speculative-num-draft-tokens sets the verify width)",
    )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = get(name)
        refuse(
            value is not None and float(value) != 1.0,
            f"--{name.replace('_', '-')} {value} changes the output distribution; use 1.0",
        )
    # SGLang copies the target's --quantization into this field; its own mark tells who set it.
    asked_for = get("_speculative_draft_quantization_explicitly_set")
    refuse(
        get("speculative_draft_model_quantization") if asked_for is None else asked_for,
        "a quantised drafter is not supported; drop --speculative-draft-model-quantization",
    )
    refuse(
        get("speculative_adaptive"),
        "LONGSPARK has a fixed verify width; drop --speculative-adaptive",
    )
    refuse(
        get("enable_unified_memory"),
        "the unified memory pool hides row ids behind virtual ones; drop --enable-unified-memory",
    )
    refuse(
        get("enable_two_batch_overlap"),
        "two-batch overlap splits the rows that the taps read; drop --enable-two-batch-overlap",
    )
    refuse(get("enable_pdmux"), "PD multiplexing is not supported; drop --enable-pdmux")
    refuse(
        get("enable_lora") or get("lora_paths"),
        "LoRA adapters are not supported with LONGSPARK yet; drop --enable-lora / --lora-paths",
    )
    device = str(get("device") or "cpu").split(":")[0]
    refuse(
        device not in ("cpu", "cuda"),
        f"device {device} was never run with LONGSPARK; use cuda or cpu",
    )
    refuse(
        get("enable_hierarchical_cache") and device == "cpu",
        "HiCache pins its host tier through CUDA, which the CPU platform lacks; drop "
        "--enable-hierarchical-cache",
    )
    return reasons


def verify_width_refusals(width: int | None, config: LongSparkConfig) -> list[str]:
    """`--speculative-num-draft-tokens` counts the anchor: 2 to K+1 are served."""
    if width is None or 2 <= width <= config.verify_width:
        return []
    return [
        f"--speculative-num-draft-tokens {width}: this drafter verifies 2 to "
        f"{config.verify_width} tokens a round (anchor included)"
    ]


def parallel_refusals(tp_size: int, config: LongSparkConfig) -> list[str]:
    """The drafter's heads and MLP are split over the target's ranks, so they must divide evenly."""
    reasons = []
    for name, size in (
        ("query heads", config.num_attention_heads),
        ("MLP columns", config.intermediate_size),
    ):
        if size % tp_size:
            reasons.append(
                f"--tp-size {tp_size} does not divide the drafter's {size} {name}; use a divisor"
            )
    kv_heads = config.num_key_value_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        reasons.append(
            f"--tp-size {tp_size} and the drafter's {kv_heads} KV heads: one must divide the other"
        )
    return reasons


def target_refusals(hf_config: Any, config: LongSparkConfig) -> list[str]:
    """Reasons why this target cannot be drafted for by this checkpoint."""
    reasons = list(config.validate_target(hf_config))

    def get(name: str) -> Any:
        return (
            hf_config.get(name)
            if isinstance(hf_config, Mapping)
            else getattr(hf_config, name, None)
        )

    if get("kv_lora_rank"):
        reasons.append("the target uses latent attention (MLA): it has no per-head K/V rows")
    return reasons


def number(name: str, default: int) -> int:
    """The environment variable `name` as a whole number >= 0; ValueError names it otherwise."""
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{name}={text!r} must be a whole number, 0 or more")
    return int(text) if text else default


def flag(name: str) -> bool:
    """Is the environment variable `name` switched on (1, true, yes)?"""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
