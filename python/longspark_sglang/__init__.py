"""LongSpark for SGLang. Importing this package needs neither sglang, CUDA nor compiled operators."""

__version__ = "0.1.0"
