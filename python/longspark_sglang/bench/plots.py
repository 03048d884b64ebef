"""Plots (PNG and SVG) and one HTML report that opens without a network, from JSON lines."""

from __future__ import annotations

import argparse
import base64
import html
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longspark_sglang.bench.options import BenchError, name_of_size
from longspark_sglang.bench.record import read_lines

COLOURS = {
    "LONGSPARK": "#d62728",
    "plain": "#555555",
    "DSPARK": "#1f77b4",
    "DFLASH": "#2ca02c",
    "EAGLE3": "#9467bd",
}
PHASE_COLOURS = {
    "proposal": "#d62728",
    "sampling": "#ff9896",
    "verify": "#1f77b4",
    "accept": "#aec7e8",
    "update": "#2ca02c",
    "other": "#bbbbbb",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; font-size: 12.5px; }
img { max-width: 100%; } h2 { margin-top: 2.5rem; }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `longspark bench plot`."""
    parser.add_argument("lines", nargs="+", help="JSON lines of measurements")
    parser.add_argument("--report", required=True, metavar="FOLDER", help="where the files go")


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """`longspark bench plot`; returns the exit code."""
    try:
        rows = read_lines(options.lines)
    except (OSError, ValueError) as error:
        raise BenchError(f"the lines cannot be read: {error}") from error
    print(write_report(rows, options.report))
    return 0


def write_report(rows: Sequence[dict[str, Any]], folder: str | Path) -> Path:
    """Write every plot that the lines allow and report.html; returns its path.

    Raises BenchError where matplotlib is missing or the lines hold no measurement.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install 'longspark-sglang[bench]'") from error
    matplotlib.use("Agg")
    kinds = dict.fromkeys(row["kind"] for row in rows if row.get("kind") in PLOTS)
    measured = [kind for kind in dict.fromkeys(row.get("kind") for row in rows) if kind in TABLES]
    if not measured:
        raise BenchError("these lines hold no measurement")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    images: dict[str, list[Path]] = {}
    for kind in kinds:
        chosen = [row for row in rows if row.get("kind") == kind]
        for name, draw in PLOTS[kind].items():
            images.setdefault(kind, []).append(_save(draw, chosen, target / name))
    page = target / "report.html"
    page.write_text(_page(rows, measured, images), encoding="utf-8")
    return page


def _save(draw: Callable[[Any, Sequence[dict[str, Any]]], None], rows: Any, stem: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    draw(axes, rows)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for suffix in (".svg", ".png"):
        figure.savefig(stem.with_suffix(suffix), dpi=140)
    pyplot.close(figure)
    return stem.with_suffix(".png")


def _page(
    rows: Sequence[dict[str, Any]], kinds: Sequence[str], images: dict[str, list[Path]]
) -> str:
    """The report: everything is inside the file."""
    parts = [f"<!doctype html><meta charset=utf-8><title>LongSpark</title><style>{STYLE}</style>"]
    parts.append("<h1>longspark bench</h1>")
    for kind in kinds:
        parts.append(f"<h2>{html.escape(kind)}</h2>")
        for image in images.get(kind, ()):
            data = base64.b64encode(image.read_bytes()).decode()
            parts.append(f'<p><img alt="{image.stem}" src="data:image/png;base64,{data}"></p>')
        module = importlib.import_module(f"longspark_sglang.bench.{TABLES[kind]}")
        text = module.summary([row for row in rows if row.get("kind") == kind])
        parts.append(f"<pre>{html.escape(text)}</pre>")
    parts.append("<h2>how it was measured</h2>")
    for row in rows:
        if row.get("kind") in ("environment", "settings"):
            parts.append(f"<pre>{html.escape(json.dumps(row, indent=2))}</pre>")
    return "\n".join(parts) + "\n"


# -- single plots ----------------------------------------------------------------------------------


def _line(axes: Any, points: Sequence[tuple[float, dict[str, float]]], method: str) -> None:
    """Medians with their extremes."""
    points = sorted(points, key=lambda point: point[0])
    x = [point[0] for point in points]
    y = [point[1]["median"] for point in points]
    below = [point[1]["median"] - point[1]["min"] for point in points]
    above = [point[1]["max"] - point[1]["median"] for point in points]
    axes.errorbar(
        x, y, yerr=[below, above], marker="o", capsize=3, label=method, color=COLOURS.get(method)
    )


def _sizes(axes: Any, values: Sequence[int], label: str) -> None:
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [name_of_size(value) for value in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _by_method(
    axes: Any, rows: Sequence[dict[str, Any]], x: str, y: str, label: str, unit: str
) -> None:
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [(row[x], row[y]) for row in rows if row["method"] == method and row.get(y)]
        if points:
            _line(axes, points, method)
    _sizes(axes, [row[x] for row in rows], label)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.legend()


def _drafting(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    ours = [row for row in rows if row["method"] == "LONGSPARK"]
    for batch in dict.fromkeys(row["batch"] for row in ours):
        cells = [row for row in ours if row["batch"] == batch]
        for what, style, name in (
            ("drafting_ms", "-", "proposal + sampling"),
            ("update_ms", ":", "update"),
        ):
            points = sorted((row["context"], row[what]["median"]) for row in cells)
            axes.plot(*zip(*points, strict=True), style, marker="o", label=f"{name}, B={batch}")
    _sizes(axes, [row["context"] for row in ours], "context (synthetic)")
    axes.set_ylabel("median ms a round")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.set_title("LONGSPARK: what a round spends on drafting")


def _phases(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    ours = sorted(
        (row for row in rows if row["method"] == "LONGSPARK"),
        key=lambda row: (row["batch"], row["context"]),
    )
    names = [f"{name_of_size(row['context'])}\nB={row['batch']}" for row in ours]
    base = [0.0] * len(ours)
    for phase, colour in PHASE_COLOURS.items():
        heights = [row["ms"].get(phase, {"median": 0.0})["median"] for row in ours]
        axes.bar(names, heights, bottom=base, color=colour, label=phase)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set_ylabel("median ms a round")
    axes.legend()
    axes.set_title("LONGSPARK: one round by phase (synthetic context)")


def _memory(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        values = [value / 2**20 for value in row["state_bytes"].values()]
        if any(values):
            axes.plot(
                list(row["state_bytes"]), values, marker="o", label=row["method"],
                color=COLOURS.get(row["method"]),
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("context")
    axes.set_ylabel("MiB of drafter state a request")
    axes.legend()


PLOTS: dict[str, dict[str, Callable[[Any, Sequence[dict[str, Any]]], None]]] = {
    "rounds": {"rounds-drafting": _drafting, "rounds-phases": _phases},
    "context": {
        "context-tpot": lambda axes, rows: _by_method(
            axes, rows, "context", "tpot_ms", "context", "ms per output token (min..max)"
        ),
        "context-accept": lambda axes, rows: _by_method(
            axes, rows, "context", "accept_length", "context", "accept length (min..max)"
        ),
    },
    "concurrency": {
        "concurrency-throughput": lambda axes, rows: _by_method(
            axes, rows, "concurrency", "throughput", "requests at a time", "output tokens a second"
        ),
        "concurrency-gain": lambda axes, rows: _by_method(
            axes, rows, "concurrency", "over_plain", "requests at a time", "over plain decoding"
        ),
    },
    "breakeven": {
        "breakeven": lambda axes, rows: _by_method(
            axes, rows, "context", "breakeven", "context", "break-even accept length"
        ),
    },
    "memory": {"memory": _memory},
}
# kind of a line -> module whose `summary` makes its table
TABLES = {
    "rounds": "rounds",
    "context": "context",
    "concurrency": "concurrency",
    "breakeven": "breakeven",
    "memory": "memory",
    "quality": "quality",
}
