"""`longspark check`: what is missing, what moved, and every refusal of server arguments at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from longspark_sglang import check
from longspark_sglang.report import Report
from longspark_sglang.serving import compat

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/compatibility.md"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user runs it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LONGSPARK_", "SGLANG_"))}
    return subprocess.run(
        [sys.executable, "-m", "longspark_sglang.cli", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch):
    """`check.examine` in this process, without loading the plugin into it."""
    monkeypatch.setattr(check, "_plugin", lambda: check.Finding("plugin", None, "not tried"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in compat.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return check.examine


def finding(report: Report, name: str) -> SimpleNamespace:
    found = [f for findings in report.sections.values() for f in findings if f.name == name]
    assert len(found) == 1, (name, report.text())
    return SimpleNamespace(**found[0].as_dict())


def arguments(target: Path | str, drafter: Path | str, *more: str) -> list[str]:
    return [
        *("--model-path", str(target), "--speculative-algorithm", "LONGSPARK"),
        *("--speculative-draft-model-path", str(drafter), "--device", "cpu", *more),
    ]


# -- the command as a user runs it -----------------------------------------------------------------


def test_a_sound_installation_with_a_fitting_pair(tiny_target: Path, tiny_drafter: Path) -> None:
    # Our options may stand anywhere among the server's.
    done = command(*arguments(tiny_target, tiny_drafter, "--json"), "--tp-size", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout)
    sections = {
        title: {f["name"]: f for f in findings} for title, findings in content["sections"].items()
    }
    assert content["passed"] is True
    assert sections["environment"]["sglang"]["figure"] in compat.TESTED_SGLANG
    assert sections["SGLang"]["plugin"]["passed"] is True
    assert sections["SGLang"]["plugin"]["figure"].startswith("registered, ")
    total = len(compat.SYMBOLS)
    assert sections["SGLang"]["touched names"]["figure"] == f"{total} of {total} fit"
    assert set(sections["environment variables"]) == set(compat.ENVIRONMENT)
    assert [f["passed"] for f in sections["server arguments"].values()] == [True] * 5


def test_every_refusal_at_once_and_no_traceback(tiny_target: Path, tiny_drafter: Path) -> None:
    more = ["--pp-size", "2", "--kv-cache-dtype", "fp8_e5m2", "--speculative-num-steps", "3"]
    more += ["--speculative-num-draft-tokens", "99", "--enable-lora"]
    more += ["--json-model-override-args", '{"rope_parameters": {"rope_theta": 5.0}}']
    done = command(*arguments(tiny_target, tiny_drafter, *more), LONGSPARK_WARN_ROUNDS="soon")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    for words in (
        "use --pp-size 1",
        "use --kv-cache-dtype auto",
        "leave --speculative-num-steps out",
        "--speculative-num-draft-tokens 99: this drafter verifies 2 to 8",
        "drop --enable-lora",
        "qwen_rope_theta 10000.0 differs from the target's rope_theta 5.0",
        "LONGSPARK_WARN_ROUNDS='soon' must be a whole number",
    ):
        assert words in done.stdout
    assert done.stdout.endswith("FAILED\n")


def test_a_hook_that_cannot_be_applied_is_named() -> None:
    code = (
        "from longspark_sglang.serving import hooks\n"
        "from longspark_sglang.cli import main\n"
        "hooks.HOOKS['sglang.srt.mem_cache.allocation_sizing.gone'] = lambda original: None\n"
        "raise SystemExit(main(['check']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "Failed to apply hooks to sglang.srt.mem_cache.allocation_sizing.gone" in done.stdout
    assert "hooks were not applied" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_with_nothing_installed() -> None:
    """A bare interpreter without site-packages has neither torch nor sglang."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r})\n"
        "from longspark_sglang.cli import main\n"
        "raise SystemExit(main(['check', '--model-path', 'x']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == ""
    assert "pip install 'longspark-sglang[sglang]'" in done.stdout
    assert "not examined: sglang, which parses them, is missing" in done.stdout


# -- installation ----------------------------------------------------------------------------------


def test_an_untested_release_is_pointed_out_but_served(
    examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "TESTED_SGLANG", ("0.0.1",))
    report = examine()
    assert finding(report, "sglang").passed is None
    assert finding(report, "sglang").details == ["tested releases: 0.0.1"]
    assert report.passed


def test_a_moved_name_fails_and_the_plugin_is_not_tried(
    examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = compat.Symbol("sglang.srt.no_such_module", "name", "call")
    monkeypatch.setattr(compat, "SYMBOLS", (*compat.SYMBOLS, moved))
    report = examine()
    names = finding(report, "touched names")
    total = len(compat.SYMBOLS)
    assert names.passed is False and names.figure == f"{total - 1} of {total} fit"
    assert "sglang.srt.no_such_module.name is gone" in names.details[0]
    assert "plugin" not in report.text()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SGLANG_PLUGINS", "another", "name it in SGLANG_PLUGINS"),
        ("LONGSPARK_DISABLE", "1", "unset LONGSPARK_DISABLE"),
    ],
)
def test_a_plugin_that_is_kept_from_loading(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    from sglang.srt import plugins
    from sglang.srt.speculative import spec_registry

    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    monkeypatch.setenv(name, value)
    found = check._plugin()
    assert found.passed is False
    assert words in found.details[0]


def test_imported_names_come_from_the_sources(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = check.imported_names()
    assert ("sglang.srt.managers.utils", "GenerationBatchResult") in names
    assert finding(examine(), "imported names").figure == f"{len(names)} of {len(names)} found"
    monkeypatch.setattr(check, "imported_names", lambda: [("sglang.srt.managers.utils", "gone")])
    imported = finding(examine(), "imported names")
    assert imported.passed is False and "managers.utils.gone" in imported.details[0]


def test_a_backend_that_was_not_built(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPARK_OPS_BACKEND", "fastest")
    operators = finding(examine(), "operators")
    assert operators.passed is False
    assert "LONGSPARK_OPS_BACKEND is 'fastest'" in operators.figure


def test_variables_show_their_value_and_typos(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPARK_WARN_ROUNDS", "50")
    monkeypatch.setenv("LONGSPARK_CHEKC", "1")
    report = examine()
    assert finding(report, "LONGSPARK_WARN_ROUNDS").figure.startswith("50 ")
    assert finding(report, "LONGSPARK_CHECK").figure.startswith("(unset) ")
    assert "did you mean LONGSPARK_CHECK?" in finding(report, "LONGSPARK_CHEKC").figure
    assert report.passed


# -- server arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model-path", "x", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--model-path", "x", "--tp-size", "two"], "invalid int value: 'two'"),
        (["--tp-size", "2"], "--model-path"),
        (["--model-path", "x", "--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_arguments_that_sglang_does_not_parse(examine, argv: list[str], words: str) -> None:
    report = examine(argv)
    parsed = finding(report, "arguments")
    assert parsed.passed is False
    assert words in parsed.details[0] and "usage:" not in parsed.details[0]


def test_parsing_leaves_logging_as_it_was() -> None:
    import logging

    before = logging.getLogger().handlers[:], logging.getLogger().level
    args, problem = check.parse_server_args(["--model-path", "x", "--log-level", "debug"])
    assert problem == "" and args is not None and args.model_path == "x"
    assert (logging.getLogger().handlers[:], logging.getLogger().level) == before
    # Not resolved: that step reads devices and changes the environment.
    assert not getattr(args, "_resolution_finished", False)


def test_another_algorithm_is_a_failure(examine, tiny_target: Path) -> None:
    report = examine(["--model-path", str(tiny_target)])
    assert finding(report, "algorithm").details == ["add --speculative-algorithm LONGSPARK"]
    assert "--speculative-draft-model-path" in finding(report, "configuration").details[0]
    assert finding(report, "target").passed is None


def test_a_drafter_that_is_none(examine, tiny_target: Path) -> None:
    report = examine(arguments(tiny_target, tiny_target))
    drafter = finding(report, "drafter")
    assert drafter.passed is False and len(drafter.details) > 5
    assert any(detail.startswith("model_type is ") for detail in drafter.details)
    report = examine(arguments(tiny_target, "/no/such/folder"))
    assert finding(report, "drafter").details == ["no such folder, and no hub id (owner/name)"]


def test_a_damaged_drafter(examine, tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_drafter, tmp_path / "drafter")
    (tmp_path / "drafter/model.safetensors").write_bytes(b"\0" * 100)
    weights = finding(examine(arguments(tiny_target, tmp_path / "drafter")), "weights")
    assert weights.passed is False and "fetch it again" in weights.details[0]


def test_a_target_that_is_missing_or_does_not_fit(
    examine, tiny_target: Path, tiny_drafter: Path, fifty_target: Path
) -> None:
    report = examine(arguments("/no/such/target", tiny_drafter))
    assert "no such folder" in finding(report, "target").details[0]
    report = examine(arguments(fifty_target, tiny_drafter))
    target = finding(report, "target")
    assert target.passed is False
    for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
        assert any(key in detail for detail in target.details)
    # The overrides of the command line count.
    override = ["--json-model-override-args", '{"vocab_size": 3000}']
    target = finding(examine(arguments(tiny_target, tiny_drafter, *override)), "target")
    assert any("vocab_size 2048 differs" in detail for detail in target.details)
    broken = ["--json-model-override-args", "{vocab"]
    target = finding(examine(arguments(tiny_target, tiny_drafter, *broken)), "target")
    assert target.passed is False and "JSONDecodeError" in target.details[0]


# -- documentation ---------------------------------------------------------------------------------


def test_the_tables_in_the_documentation_are_in_step() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text == check.with_tables(text), (
        "run `longspark check --update-docs docs/compatibility.md`"
    )


def test_update_docs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    text = DOCS.read_text(encoding="utf-8")
    page.write_text(text.replace("LONGSPARK_DISABLE", "LONGSPARK_OLD"), encoding="utf-8")
    assert check.main(["--update-docs", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == text
    page.write_text("no tables here", encoding="utf-8")
    assert check.main(["--update-docs", str(page)]) == 1
    assert "there is no place for the table" in capsys.readouterr().err
