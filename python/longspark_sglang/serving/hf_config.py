"""The drafter's model type for transformers' AutoConfig, which SGLang opens draft folders with."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig


class DraftFreeKVConfig(PretrainedConfig):
    """A bag of the config.json's keys; `LongSparkConfig` is what we read and check ourselves."""

    model_type = "draftfreekv"


def install() -> None:
    """Make AutoConfig know the released config.json; a second call changes nothing."""
    AutoConfig.register(DraftFreeKVConfig.model_type, DraftFreeKVConfig, exist_ok=True)
