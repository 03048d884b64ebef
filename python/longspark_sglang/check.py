"""`longspark check`: can this installation serve LONGSPARK, and with these server arguments?

Everything that would stop the server later is found now and listed at once: missing packages,
SGLang names that moved, a plugin that did not load, refused server arguments, and a drafter that
does not fit the target. Nothing is started and no weight reaches a device. SGLang is imported
inside the functions that ask it, so that the command can say what is missing where it is not
installed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import io
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from longspark_sglang.config import ConfigError, LongSparkConfig, LongSparkError
from longspark_sglang.report import Finding, Report
from longspark_sglang.serving import compat

DISTRIBUTIONS = ("longspark-sglang", "torch", "sglang", "transformers", "flashinfer-python")
WHOLE_NUMBERS = ("LONGSPARK_CHECK", "LONGSPARK_SNAPSHOT_MB", "LONGSPARK_WARN_ROUNDS")
# Read while installing, not while serving.
BUILD_VARIABLES = ("LONGSPARK_BUILD",)
# Loggers whose errors mean that the plugin is not in place.
_PLUGIN_LOGGERS = ("sglang.srt.plugins", "longspark")


def main(argv: Sequence[str]) -> int:
    """Print the report; 0 when LONGSPARK could be served, else 1."""
    parser = argparse.ArgumentParser(
        prog="longspark check",
        usage="longspark check [-h] [--json | --update-docs FILE] [launch_server arguments ...]",
        description="Lists everything that keeps LONGSPARK from serving: what is not installed, "
        "SGLang names that moved, and every refusal of the server arguments that follow (those of "
        "`python -m sglang.launch_server`), target and drafter included. Starts nothing.",
        allow_abbrev=False,
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the report as JSON")
    output.add_argument(
        "--update-docs",
        metavar="FILE",
        help="only rewrite the generated tables of docs/compatibility.md",
    )
    options, server_argv = parser.parse_known_args(argv)
    if options.update_docs:
        return _update_docs(Path(options.update_docs))
    # Imports below print to stdout now and then, which belongs to the report.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = examine(server_argv)
    report.print(options.json)
    return report.exit_code


def examine(server_argv: Sequence[str] = ()) -> Report:
    """Look at the installation and, when there are any, at launch_server's arguments."""
    report = Report()
    report.add("environment", *_packages(), *_hardware())
    names = [_touched_names(), _imported_names()]
    report.add("SGLang", *names)
    if all(finding.passed for finding in names):
        report.add("SGLang", _plugin())
    report.add("environment variables", *_variables())
    if server_argv:
        report.add("server arguments", *_server_arguments(server_argv))
    return report


# -- installation ----------------------------------------------------------------------------------


def _packages() -> Iterator[Finding]:
    yield Finding("python", None, platform.python_version())
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = None
        if name == "sglang" and found is not None:
            tested = found in compat.TESTED_SGLANG
            hint = f"tested releases: {', '.join(compat.TESTED_SGLANG)}"
            yield Finding(name, True if tested else None, found, () if tested else (hint,))
        elif found is None and name in ("torch", "sglang"):
            extra = "[sglang]" if name == "sglang" else ""
            fix = f"pip install 'longspark-sglang{extra}'"
            yield Finding(name, False, "not installed", (fix,))
        else:
            yield Finding(name, None, found or "not installed")


def _hardware() -> Iterator[Finding]:
    """Devices, and where the operators come from on them."""
    try:
        import torch

        from longspark_sglang import ops
    except ImportError as error:
        yield Finding("operators", False, f"cannot be imported: {error}")
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_name(i) for i in range(count)]
    yield Finding("devices", None, ", ".join(devices) or f"cpu ({os.cpu_count()} cores)")
    try:
        sources = ops.sources()
    except ops.BackendError as error:
        yield Finding("operators", False, str(error))
        return
    for source in sorted(set(sources.values())):
        names = sorted(op for op, its_source in sources.items() if its_source == source)
        yield Finding("operators", None, f"{source}: {', '.join(names)}")


def _touched_names() -> Finding:
    """The symbol table: does SGLang still have every name that the plugin calls or overrides?"""
    total = len(compat.SYMBOLS)
    if compat.installed_sglang() is None:
        return Finding("touched names", False, f"none of {total} could be looked at")
    try:
        problems = compat.environment_problems()
        wrong = len(compat.missing_symbols()) if problems else 0
    except Exception as error:  # an import of SGLang can fail in any way a library can
        return Finding("touched names", False, _in_one_line(error))
    return Finding("touched names", not problems, f"{total - wrong} of {total} fit", problems)


def _imported_names() -> Finding:
    """Every name that the serving package imports from SGLang: is it there?"""
    names = imported_names()
    if compat.installed_sglang() is None:
        return Finding("imported names", False, f"none of {len(names)} could be looked at")
    problems = []
    for module, name in names:
        try:
            getattr(importlib.import_module(module), name)
        except Exception as error:  # see above
            problems.append(f"{module}.{name}: {_in_one_line(error)}")
    figure = f"{len(names) - len(problems)} of {len(names)} found"
    return Finding("imported names", not problems, figure, problems)


def imported_names() -> list[tuple[str, str]]:
    """(module, name) of each `from sglang... import name` in the serving package's sources."""
    folder = Path(compat.__file__).parent
    return sorted(
        {
            (node.module, alias.name)
            for path in folder.glob("*.py")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "sglang"
            for alias in node.names
        }
    )


def _plugin() -> Finding:
    """Load SGLang's plugins as the launcher does, and see whether LONGSPARK is among them."""
    if compat.flag("LONGSPARK_DISABLE"):
        return Finding("plugin", False, "switched off", ("unset LONGSPARK_DISABLE",))
    with _collected_logs() as records:
        try:
            from sglang.srt.plugins import load_plugins

            load_plugins()
            from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

            SpeculativeAlgorithm.from_string(compat.ALGORITHM)
            hooks = importlib.import_module("longspark_sglang.serving.hooks")
            hooks.assert_applied()
            registered, figure, problems = True, f"registered, {len(hooks.HOOKS)} hooks applied", []
        except ValueError:  # from_string's answer to a name it does not know
            registered, figure = False, "not registered"
            problems = [
                "SGLang did not load the entry point `longspark` of longspark-sglang: reinstall it "
                "(pip install), and name it in SGLANG_PLUGINS if that variable is set"
            ]
        except Exception as error:  # two platforms, a broken driver, ...: SGLang's own words
            registered, figure, problems = False, "not in place", [_in_one_line(error)]
    problems += [
        f"{record.getMessage()}: {_in_one_line(record.exc_info[1])}"
        for record in records
        if record.levelno >= logging.ERROR
        and record.name.startswith(_PLUGIN_LOGGERS)
        and record.exc_info
        and record.exc_info[1]
    ]
    return Finding("plugin", registered and not problems, figure, problems)


def _variables() -> Iterator[Finding]:
    for name, meaning in compat.ENVIRONMENT.items():
        figure, faults = f"{os.environ.get(name, '(unset)')}    {meaning}", []
        if name in WHOLE_NUMBERS:
            try:
                compat.number(name, 0)
            except ValueError as error:
                faults = [str(error)]
        yield Finding(name, False if faults else None, figure, faults)
    for name in sorted(os.environ):
        if name.startswith("LONGSPARK_") and name not in {*compat.ENVIRONMENT, *BUILD_VARIABLES}:
            close = difflib.get_close_matches(name, compat.ENVIRONMENT, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            yield Finding(name, None, f"read by no part of LONGSPARK's serving{hint}")


# -- server arguments ------------------------------------------------------------------------------


def _server_arguments(argv: Sequence[str]) -> Iterator[Finding]:
    if compat.installed_sglang() is None:
        yield Finding("arguments", False, "not examined: sglang, which parses them, is missing")
        return
    args, problem = parse_server_args(argv)
    if args is None:
        yield Finding("arguments", False, "SGLang's parser refuses them", (problem,))
        return
    name = (args.speculative_algorithm or "").upper()
    asked = name == compat.ALGORITHM
    yield Finding(
        "algorithm",
        asked,
        name or "none",
        () if asked else (f"add --speculative-algorithm {compat.ALGORITHM}",),
    )
    refusals = compat.server_refusals(args)
    yield Finding("configuration", not refusals, _refusal_count(refusals), refusals)
    config = None
    if args.speculative_draft_model_path:
        config, findings = _drafter(args)
        yield from findings
    yield _target(args, config)


def parse_server_args(argv: Sequence[str]) -> tuple[Any | None, str]:
    """(SGLang's ServerArgs, "") as launch_server would parse them, or (None, what is wrong).

    The record is not resolved: that step reads devices and writes environment variables.
    """
    complaint = io.StringIO()
    # argparse prints its complaint and leaves; the parser also replaces all log handlers.
    with _collected_logs(), contextlib.redirect_stderr(complaint):
        try:
            from sglang.srt.server_args import prepare_server_args

            return prepare_server_args(list(argv)), ""
        except SystemExit:
            lines = complaint.getvalue().strip().splitlines() or ["no reason given"]
            return None, lines[-1].rpartition("error: ")[2]
        except Exception as error:  # a wrong --config file, an SGLang that cannot be imported
            return None, _in_one_line(error)


def _drafter(args: Any) -> tuple[LongSparkConfig | None, list[Finding]]:
    """Can the drafter be read? Its config where it can, and what was found."""
    path = args.speculative_draft_model_path
    try:
        config = LongSparkConfig.from_pretrained(
            path, revision=args.speculative_draft_model_revision
        )
    except LongSparkError as error:
        figure = "config.json cannot be used" if isinstance(error, ConfigError) else "not found"
        return None, [Finding("drafter", False, figure, error.reasons)]
    except Exception as error:  # the file system's
        return None, [Finding("drafter", False, "cannot be read", (_in_one_line(error),))]
    width = compat.verify_width_refusals(args.speculative_num_draft_tokens, config)
    shape = (
        f"{config.num_layers} layers on target layers {list(config.tapped_layers)}, window "
        f"{config.window}, {config.summary_slots} summary slots, {config.num_draft_tokens} drafts"
    )
    return config, [Finding("drafter", not width, shape, width), _weights(path, config)]


def _weights(path: str, config: LongSparkConfig) -> Finding:
    if not os.path.isdir(path):
        return Finding("weights", None, "on the hub: looked at when the server loads them")
    from longspark_sglang import checkpoint

    try:
        tensors = checkpoint.load_state(path, config)
    except checkpoint.CheckpointError as error:
        return Finding("weights", False, _refusal_count(error.reasons), error.reasons)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Finding("weights", True, f"{len(tensors)} tensors, {size / 2**20:.1f} MiB")


def _target(args: Any, config: LongSparkConfig | None) -> Finding:
    """Can the target be read, and is the drafter one for it?"""
    try:
        target = _target_config(args)
    except Exception as error:  # not found, unknown architecture, remote code, bad overrides, ...
        return Finding("target", False, f"cannot read {args.model_path}", (_in_one_line(error),))
    if config is None:
        return Finding("target", None, "readable; no drafter to compare it with")
    misfits = compat.target_refusals(target, config)
    return Finding("target", not misfits, _refusal_count(misfits), misfits)


def _target_config(args: Any) -> Any:
    """The target's text config as SGLang's model runner sees it, overrides applied."""
    from sglang.srt.utils.hf_transformers import get_config, get_hf_text_config

    if os.path.isabs(args.model_path) and not os.path.exists(args.model_path):
        raise FileNotFoundError("no such folder")  # the hub client's words for it are a riddle
    with _collected_logs():
        return get_hf_text_config(
            get_config(
                args.model_path,
                trust_remote_code=args.trust_remote_code,
                revision=args.revision,
                model_override_args=json.loads(args.json_model_override_args or "{}"),
            )
        )


# -- documentation ---------------------------------------------------------------------------------


def markdown_tables() -> dict[str, str]:
    """The generated tables of docs/compatibility.md: "symbols" and "environment"."""
    symbols = ["| SGLang name | use | parameters relied on |", "|---|---|---|"]
    for symbol in compat.SYMBOLS:
        parameters = ", ".join(f"`{name}`" for name in symbol.parameters)
        row = f"| `{symbol.module}.{symbol.path}` | {symbol.use} | {parameters} |"
        symbols.append(row.replace("|  |", "| |"))
    variables = ["| variable | meaning |", "|---|---|"]
    for name, meaning in compat.ENVIRONMENT.items():
        escaped = meaning.replace("|", "\\|")
        variables.append(f"| `{name}` | {escaped} |")
    return {"symbols": "\n".join(symbols), "environment": "\n".join(variables)}


def with_tables(text: str) -> str:
    """A Markdown text with what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`
    replaced by the table of that name.

    Raises ValueError naming a table that has no such place.
    """
    for name, table in markdown_tables().items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"there is no place for the table: {begin.strip()} ... {end}")
        text = f"{before}{begin}{table}\n{end}{after}"
    return text


def _update_docs(path: Path) -> int:
    try:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"longspark check: {path}: {error}", file=sys.stderr)
        return 1
    return 0


# -- helpers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _collected_logs() -> Iterator[list[logging.LogRecord]]:
    """Keep log records off the terminal and hand them over; handlers are restored afterwards."""
    records: list[logging.LogRecord] = []
    collector = logging.Handler()
    collector.emit = records.append  # type: ignore[assignment,method-assign]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [collector]
    try:
        yield records
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    kind = type(error).__name__
    return text if isinstance(error, LongSparkError) else f"{text} ({kind})"


def _refusal_count(reasons: Sequence[str]) -> str:
    if not reasons:
        return "no refusal"
    return "1 refusal" if len(reasons) == 1 else f"{len(reasons)} refusals"
