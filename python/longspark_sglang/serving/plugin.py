"""Entry point of the plugin group `sglang.srt.plugins`: registers LONGSPARK and its hooks.

SGLang logs a plugin's exception and goes on, after which the user would read "unknown speculative
algorithm". So nothing may raise here: what went wrong is kept and raised as a readable error when
the server arguments that ask for LONGSPARK are validated.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the algorithm and the hooks it needs. Called once in every SGLang process."""
    from longspark_sglang.serving import compat

    if compat.flag("LONGSPARK_DISABLE"):
        logger.warning("LONGSPARK_DISABLE is set: the LONGSPARK algorithm is not registered")
        return
    try:
        _register()
    except Exception as error:  # the entry point must not raise, see the module docstring
        logger.exception("LONGSPARK could not be registered")
        _register_failure(error)


def _register() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from longspark_sglang.serving import compat, hf_config, hooks
    from longspark_sglang.serving.algorithm import (
        LongSparkAlgorithm,
        validate_server_args,
        worker_class,
    )

    problems = compat.environment_problems()
    if problems:
        raise RuntimeError("; ".join(problems))
    hf_config.install()
    hooks.install()

    def validate(args: Any) -> None:
        hooks.assert_applied()
        validate_server_args(args)

    SpeculativeAlgorithm.register(
        compat.ALGORITHM,
        supports_overlap=True,
        validate_server_args=validate,
        spec_class=LongSparkAlgorithm,
    )(worker_class)


def _register_failure(error: Exception) -> None:
    """Register the name with a validator that explains why it cannot run."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from longspark_sglang.serving import compat

    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from longspark_sglang.serving import hooks

        # Else SGLang's own complaint about the drafter's config comes before the explanation below.
        HookRegistry.register(hooks.ALIAS, hooks.algorithm_alias, HookType.AROUND)
    except Exception:
        logger.exception("the drafter's config may be reported before the reason above")

    def explain(args: Any) -> None:
        raise ValueError(
            f"the LONGSPARK plugin failed to load with sglang {compat.installed_sglang()}: "
            f"{error}. Run `longspark check` for the list of what does not fit."
        ) from error

    def no_worker(args: Any) -> type:
        explain(args)
        raise AssertionError("unreachable")

    SpeculativeAlgorithm.register(
        compat.ALGORITHM, supports_overlap=True, validate_server_args=explain
    )(no_worker)
