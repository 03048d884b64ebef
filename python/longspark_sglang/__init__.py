"""LongSpark for SGLang. Importing it needs neither sglang, CUDA nor compiled operators."""

__version__ = "0.1.0"
