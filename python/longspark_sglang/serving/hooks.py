"""The places of SGLang that must know LONGSPARK by name, hooked through its HookRegistry.

Each hook leaves every other algorithm alone. SGLang only logs a hook that could not be applied, so
`assert_applied` looks for itself before the server starts.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from longspark_sglang.serving.compat import ALGORITHM


def _is_longspark(spec_algorithm: Any) -> bool:
    return getattr(spec_algorithm, "name", None) == ALGORITHM


def algorithm_alias(original, speculative_algorithm, *args, **kwargs) -> str | None:
    """Resolve the algorithm's name without opening the drafter as a transformers model.

    SGLang would ask AutoConfig first, whose error about a missing or broken folder would come
    before ours and hide the other refusals.
    """
    if (speculative_algorithm or "").upper() == ALGORITHM:
        return ALGORITHM
    return original(speculative_algorithm, *args, **kwargs)


def row_headroom(original) -> int:
    """Cells of a request's req_to_token row beyond the context length.

    At page size 1 SGLang leaves 4 + verify width cells while a decode step reserves twice the
    verify
    width: near the context limit the reserve would spill into the neighbour's row.
    """
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_page_size,
        get_alloc_reserve_per_decode,
    )
    from sglang.srt.runtime_context import get_spec

    extra = original()
    if (get_spec().speculative_algorithm or "").upper() != ALGORITHM:
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


def request_refusal(original, scheduler, req) -> str | None:
    """Why this request is refused (answered as HTTP 400 with the text), or None.

    The method is the one admission check that SGLang makes for every request whatever the
    algorithm.
    """
    reason = original(scheduler, req)
    if reason is not None or not _is_longspark(scheduler.spec_algorithm):
        return reason
    return scheduler.draft_worker.refuse_request(req)


def report_state(original, internal_state, state) -> None:
    """Add our own numbers to /server_info beside SGLang's accept length."""
    original(internal_state, state)
    scheduler = internal_state.scheduler
    if _is_longspark(scheduler.spec_algorithm):
        state["longspark"] = scheduler.draft_worker.metrics.snapshot()


def weights_changing(original, manager, *args, **kwargs) -> Any:
    """Tell the worker before the target's weights change; SGLang's flush afterwards is optional."""
    tell = getattr(manager.draft_worker, "weights_changing", None)  # ours alone has it
    if tell is not None:
        tell()
    return original(manager, *args, **kwargs)


def dummy_verify_input(
    original, spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker
) -> Any:
    """Verify input for graph warm-up; SGLang returns None for an algorithm it does not know."""
    if not _is_longspark(spec_algorithm) or is_draft_worker:
        return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    return _empty_verify_input(num_tokens_per_req)


def graph_verify_input(original, runner, num_tokens) -> Any:
    """Verify input for graph capture, for the same reason as `dummy_verify_input`."""
    model_runner = runner.model_runner
    if not _is_longspark(model_runner.spec_algorithm) or model_runner.is_draft_worker:
        return original(runner, num_tokens)
    return _empty_verify_input(runner.captured_req_width)


def _empty_verify_input(width: int) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    return DFlashVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=int(width),
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


_SCHEDULER = "sglang.srt.managers.scheduler_components"
_WEIGHTS = f"{_SCHEDULER}.weight_updater.SchedulerWeightUpdaterManager"
_GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
ALIAS = "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias"
HOOKS = {
    ALIAS: algorithm_alias,
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": row_headroom,
    "sglang.srt.dllm.mixin.scheduler.SchedulerDllmMixin.validate_dllm_request": request_refusal,
    f"{_SCHEDULER}.internal_state.SchedulerInternalStateController._add_speculative": report_state,
    f"{_WEIGHTS}._observe_weight_load": weights_changing,
    f"{_WEIGHTS}.begin_weight_update": weights_changing,
    "sglang.srt.speculative.spec_info.create_dummy_verify_input": dummy_verify_input,
    f"{_GRAPH_RUNNER}.DecodeCudaGraphRunner.get_spec_info": graph_verify_input,
}


def install() -> None:
    """Hand every hook to SGLang's registry, which applies them after all plugins have loaded."""
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def assert_applied() -> None:
    """Raise RuntimeError naming every hook that SGLang failed to apply."""
    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            "LONGSPARK hooks were not applied (see the log above for the reason): "
            + ", ".join(missing)
        )
