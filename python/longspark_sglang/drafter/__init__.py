"""The LongSpark drafter in plain PyTorch; needs neither sglang nor compiled operators."""

from longspark_sglang.drafter.boundary import TargetViews, collect_views
from longspark_sglang.drafter.model import InputError, LongSparkDrafter, Proposal, TargetParts
from longspark_sglang.drafter.rope import Rope, rope_tables
from longspark_sglang.drafter.summary import merge, summary_of

__all__ = [
    "InputError",
    "LongSparkDrafter",
    "Proposal",
    "Rope",
    "TargetParts",
    "TargetViews",
    "collect_views",
    "merge",
    "rope_tables",
    "summary_of",
]
