"""LONGSPARK as SGLang's registry sees it: argument resolution, and refusals before weights load."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from longspark_sglang.checkpoint import CheckpointError
from longspark_sglang.config import ConfigError, LongSparkConfig
from longspark_sglang.serving import compat
from longspark_sglang.serving.target_distribution import sampler_refusals

# As SGLang's own speculative algorithms do: an unbounded batch would leave no memory for state.
DEFAULT_MAX_RUNNING_REQUESTS = 48

_configs: dict[tuple[str, str | None], LongSparkConfig] = {}


def drafter_config(args: Any) -> LongSparkConfig:
    """The drafter's config.json named by the server arguments (read once per process).

    Raises ConfigError with every problem of the file.
    """
    key = (
        args.speculative_draft_model_path,
        getattr(args, "speculative_draft_model_revision", None),
    )
    if key not in _configs:
        _configs[key] = LongSparkConfig.from_pretrained(key[0], revision=key[1])
    return _configs[key]


def refusals(args: Any) -> list[str]:
    """Everything that keeps LONGSPARK from serving these arguments, in one list."""
    reasons = compat.environment_problems() + compat.server_refusals(args) + sampler_refusals(args)
    if not args.speculative_draft_model_path:
        return reasons
    try:
        config = drafter_config(args)
    except ConfigError as error:
        return [*reasons, str(error)]
    except (OSError, CheckpointError) as error:
        return [
            *reasons,
            f"the drafter {args.speculative_draft_model_path!r} cannot be read: {error}",
        ]
    reasons += compat.verify_width_refusals(args.speculative_num_draft_tokens, config)
    reasons += compat.parallel_refusals(int(args.tp_size), config)
    return reasons


def validate_server_args(args: Any) -> None:
    """Raise one ValueError that lists every refusal."""
    reasons = refusals(args)
    if reasons:
        raise ValueError(
            "LONGSPARK cannot serve this configuration:\n  - " + "\n  - ".join(reasons)
        )


class LongSparkAlgorithm(CustomSpecAlgo):
    """A non-family algorithm: it owns no draft KV cache and no draft model runner.

    `is_dflash_family()` stays False, because True opens some forty branches that parse a DFlash
    config and size a second KV pool; the two graph-capture functions that need to know us are
    hooked instead.
    """

    def create_future_map(
        self, device, pool, needs_cpu_seq_lens=True, needs_confidence_relay=False
    ) -> FutureMap:
        return FutureMap(device, self, pool, needs_cpu_seq_lens, needs_confidence_relay)

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    def has_draft_kv(self) -> bool:
        return False

    def supports_mixed_chunk(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def handle_server_args(self, args: Any) -> None:
        """Fill in what the drafter's config decides, so that no flag beyond the path is needed."""
        args.speculative_num_steps = 1
        args.speculative_eagle_topk = 1
        if args.speculative_num_draft_tokens is None:
            args.speculative_num_draft_tokens = drafter_config(args).verify_width
        if args.max_running_requests is None:
            args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS


def worker_class(server_args: Any) -> type:
    """Worker factory for the registry; imported late because it pulls in the model code."""
    from longspark_sglang.serving.worker import LongSparkWorker

    # Arguments may have been resolved after validation (platform defaults): look once more.
    validate_server_args(resolving_view(server_args))
    return LongSparkWorker
