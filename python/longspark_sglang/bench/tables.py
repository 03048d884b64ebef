"""Tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cell(value: Any) -> str:
    """A number as short as its precision deserves; None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned Markdown: readable as it is, and pastable."""
    lines = [list(header), *[[cell(value) for value in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "| "
        + " | ".join(f"{value:<{width}}" for value, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)
