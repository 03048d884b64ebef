"""What keeps the in-tree DFLASH and DSPARK drafts from running on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def keep_embedding_dtype(
    kwargs: dict[str, Any], model_runner: Any, forward_batch: Any, *_: Any, **__: Any
) -> None:
    """Hand input embeddings over in the model's own dtype.

    Corrects srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs, which casts them to
    bfloat16 whatever the model is: a float32 DFLASH draft then fails in its first matmul.
    """
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds.to(model_runner.dtype)


def no_fused_kv_write(*_: Any, **__: Any) -> None:
    """Say that no pool has the layout of the fused norm, rotation and cache write.

    Stands in for srt.models.dspark.DSparkDraftMixin._fused_kv_write_layout, which says yes to any
    bfloat16 pool whatever the device is. SGLang's own eager path takes over, as for float32.
    """


class _ShownAsCuda:
    """A view of the resolving server arguments whose device reads "cuda"."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return "cuda" if name == "device" else getattr(self._view, name)


def handle_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """Resolve DSPARK's arguments although the device is a CPU.

    Stands in for srt.arg_groups.speculative_hook._handle_dspark, which names the devices it accepts
    and, unlike DFLASH and EAGLE, never asks the platform. Only this one function sees "cuda".
    """
    from sglang.srt.arg_groups import speculative_hook

    resolving_view = speculative_hook.resolving_view
    speculative_hook.resolving_view = lambda args: _ShownAsCuda(resolving_view(args))
    try:
        original(server_args)
    finally:
        speculative_hook.resolving_view = resolving_view
