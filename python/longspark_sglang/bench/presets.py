"""Settings by name: the published ones for people who have the GPUs, and small ones for everybody.

The published measurements (LongSpark's method page): Qwen3-4B/8B/14B; 32 requests at a time with
at most 2,048 output tokens (short tasks) or 16 with 8,192 (long ones); 30 s skipped, 120 s counted;
3 seeds, 10 for long tasks; the K/V budget fixed at 64, 48 and 96 GiB. They gave the drafter a GPU
of its own, which this package does not: compare with that in mind.
"""

from __future__ import annotations

from typing import Any

# preset -> measurement -> option -> value as on the command line
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "paper-short": {
        "concurrency": {
            "concurrency": "32", "output_tokens": 2048, "temperature": 1.0, "seeds": 3,
            "window": "30,120", "prompts_per_slot": 16, "stop_at_eos": True,
        },
        "quality": {"concurrency": 32, "output_tokens": 2048, "temperature": 1.0},
    },
    "paper-long": {
        "concurrency": {
            "concurrency": "16", "context": "64K", "output_tokens": 8192, "temperature": 1.0,
            "seeds": 10, "window": "30,120", "prompts_per_slot": 4, "stop_at_eos": True,
        },
        "context": {"contexts": "8K,16K,32K,64K,128K", "output_tokens": 512, "prompts": 10},
        "rounds": {"contexts": "1K,2K,4K,8K,16K,32K,64K,128K", "batches": "1,8", "rounds": 50},
        "breakeven": {"contexts": "2K,32K,128K", "output_tokens": 256},
        "memory": {"contexts": "1K,32K,128K"},
    },
    "paper-concurrency": {
        "concurrency": {
            "concurrency": "1,2,4,8,16,32,64,128", "output_tokens": 2048, "temperature": 1.0,
            "seeds": 3, "window": "30,120", "prompts_per_slot": 16, "stop_at_eos": True,
        },
    },
    "cpu-small": {
        "rounds": {"contexts": "1K,8K,32K,128K", "batches": "1", "rounds": 8, "repeats": 5,
                   "cold": True},
        "context": {"contexts": "1K,8K", "output_tokens": 48, "prompts": 5},
        "concurrency": {
            "concurrency": "1,4", "context": "1K", "output_tokens": 48, "seeds": 3,
        },
        "breakeven": {"contexts": "1K,8K", "output_tokens": 32},
        "memory": {"contexts": "1K,8K,128K", "mem_fraction_static": 0.1},
        "quality": {"limit": 20, "concurrency": 4, "output_tokens": 64},
        "regress": {
            "context": "16K", "rounds": 8, "repeats": 4, "prompts": 8, "output_tokens": 96,
            "clock": "cpu",
        },
    },
}  # fmt: skip


def defaults(preset: str, measurement: str) -> dict[str, Any]:
    """The preset's values for a measurement. KeyError names the measurements it has."""
    chosen = PRESETS[preset]
    if measurement not in chosen:
        raise KeyError(f"preset {preset} has nothing for {measurement}, only {', '.join(chosen)}")
    return chosen[measurement]
