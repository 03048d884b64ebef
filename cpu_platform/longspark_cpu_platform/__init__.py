"""A CPU platform for SGLang in plain torch: no sgl-kernel CPU operators, no Triton, no GPU.

Importing this package costs nothing; SGLang calls the two functions below through entry points.
"""

from __future__ import annotations

__version__ = "0.1.0"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform class, or None where a CUDA device is."""
    if _has_cuda():
        return None
    return "longspark_cpu_platform.platform:LongSparkCpuPlatform"


def register() -> None:
    """Entry point of `sglang.srt.plugins`: the hooks this platform needs. Runs in every process."""
    if _has_cuda():
        return
    from longspark_cpu_platform import hooks

    hooks.install()
