"""The `longspark` command and its reports; `check` and `verify` have files of their own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types

import pytest
from longspark_sglang import __version__, cli
from longspark_sglang.config import ConfigError
from longspark_sglang.report import Finding, Report


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name, (_, line) in cli.COMMANDS.items():
        assert name in text and line in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"longspark-sglang {__version__}"


@pytest.mark.parametrize("arguments", [[], ["chekc"], ["--chekc"]])
def test_an_unknown_command_is_bad_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: longspark" in capsys.readouterr().err


def test_asking_for_help_loads_neither_torch_nor_sglang() -> None:
    commands = list(cli.COMMANDS)
    done = python(
        "import sys\n"
        "from longspark_sglang import cli\n"
        f"for arguments in [['--help']] + [[name, '--help'] for name in {commands}]:\n"
        "    try:\n"
        "        cli.main(arguments)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, arguments\n"
        "print('loaded', {'torch', 'sglang', 'transformers'} & set(sys.modules))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("loaded set()\n")
    assert all(f"usage: longspark {name}" in done.stdout for name in commands)


def test_a_commands_arguments_reach_it_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = types.ModuleType("a_command")
    module.main = lambda argv: seen.append(list(argv)) or 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_command", module)
    monkeypatch.setitem(cli.COMMANDS, "a-command", ("a_command", "for this test"))
    arguments = ["--json", "-x", "--", "check", "--version", "--help"]
    assert cli.main(["a-command", *arguments]) == 5
    assert seen == [arguments]


def test_bad_input_and_interrupts_end_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_with(error: BaseException) -> int:
        def run(argv: list[str]) -> int:
            raise error

        module = types.ModuleType("failing")
        module.main = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "failing", module)
        monkeypatch.setitem(cli.COMMANDS, "failing", ("failing", "for this test"))
        return cli.main(["failing"])

    assert fail_with(ConfigError("this file", ["first", "second"])) == 1
    assert capsys.readouterr().err == (
        "longspark failing: this file (2 reasons):\n  - first\n  - second\n"
    )
    assert fail_with(KeyboardInterrupt()) == 130
    # A fault of ours is no bad input: it shows.
    with pytest.raises(ZeroDivisionError):
        fail_with(ZeroDivisionError())


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = (
        "import sys, types\n"
        "from longspark_sglang import cli\n"
        "module = sys.modules['spam'] = types.ModuleType('spam')\n"
        "module.main = lambda argv: [print('spam' * 99) for _ in range(99999)] and 0\n"
        "cli.COMMANDS['spam'] = ('spam', '')\n"
        "sys.exit(cli.main(['spam']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == b""


# -- reports ---------------------------------------------------------------------------------------


def make_report() -> Report:
    report = Report()
    report.add("first", Finding("a", True, "1 of 1"), Finding("longer", None, "a fact"))
    report.add("second", Finding("b", False, "0 of 2", ["one\nof two lines", "two"]))
    return report


def test_a_report_as_text() -> None:
    assert make_report().text() == (
        "first\n"
        "  ok    a       1 of 1\n"
        "  -     longer  a fact\n"
        "second\n"
        "  FAIL  b  0 of 2\n"
        "        - one\n"
        "          of two lines\n"
        "        - two\n"
        "FAILED"
    )
    assert "\x1b[31mFAIL\x1b[0m" in make_report().text(colour=True)


def test_a_report_as_json() -> None:
    content = json.loads(make_report().as_json())
    assert content["passed"] is False
    assert content["sections"]["second"] == [
        {"name": "b", "passed": False, "figure": "0 of 2", "details": ["one\nof two lines", "two"]}
    ]


def test_only_a_failed_finding_fails_a_report() -> None:
    report = Report()
    assert report.passed and report.exit_code == 0
    report.add("x", Finding("a", None, ""), Finding("b", True, ""))
    assert report.passed and report.text().endswith("passed")
    report.add("x", Finding("c", False, ""))
    assert not report.passed and report.exit_code == 1


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def printed(stream: io.StringIO) -> str:
        make_report().print(as_json=False, stream=stream)
        return stream.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in printed(Terminal())
    assert "\x1b[" not in printed(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in printed(Terminal())
