"""What the two distributions promise to SGLang and to pip, and what a checkout may hold."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/longspark_sglang"
ENTRY_POINTS = {
    "pyproject.toml": {
        "sglang.srt.plugins": {"longspark": "longspark_sglang.serving.plugin:register"},
    },
    "cpu_platform/pyproject.toml": {
        "sglang.srt.platforms": {"longspark_cpu": "longspark_cpu_platform:activate"},
        "sglang.srt.plugins": {"longspark_cpu": "longspark_cpu_platform:register"},
    },
}
MAX_FILE = 300_000  # bytes
EMBEDDED = Path("examples/smollm2-135m-longspark")  # the demo drafter
MAX_EMBEDDED = 25_000_000  # bytes, all its files together

# Paths that exist on one machine only, and package indexes: pip's own configuration names those.
MACHINE_SPECIFIC = re.compile(
    rb"/(?:root|home|Users|work|workspace|mnt|opt)/\w"
    rb"|--(?:extra-)?index-url|--find-links|--trusted-host|https?://[\w./-]*(?:pypi|/simple\b)"
)


def project(file: str) -> dict:
    return tomllib.loads((ROOT / file).read_text())["project"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize("file", ENTRY_POINTS)
def test_entry_points_are_declared_and_exist(file: str) -> None:
    assert project(file)["entry-points"] == ENTRY_POINTS[file]
    for group in ENTRY_POINTS[file].values():
        for target in group.values():
            module, function = target.split(":")
            base = ROOT / ("python" if file == "pyproject.toml" else "cpu_platform")
            path = base.joinpath(*module.split("."))
            source = path.with_suffix(".py") if not path.is_dir() else path / "__init__.py"
            names = {
                node.name
                for node in ast.parse(source.read_text()).body
                if isinstance(node, ast.FunctionDef)
            }
            assert function in names


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms"])
def test_installed_entry_points_are_the_declared_ones(group: str) -> None:
    declared = {}
    for groups in ENTRY_POINTS.values():
        declared.update(groups.get(group, {}))
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    ours = {name: value for name, value in found.items() if name in declared}
    # A CUDA machine has no need of the CPU platform, so it may be absent there.
    assert ours.items() <= declared.items()
    if group == "sglang.srt.plugins":
        assert ours["longspark"] == declared["longspark"]


def test_both_distributions_pin_the_same_sglang() -> None:
    ours, platform = (project(file)["optional-dependencies"]["sglang"] for file in ENTRY_POINTS)
    assert ours == platform == ["sglang==0.5.23"]


def test_console_script_exists() -> None:
    assert project("pyproject.toml")["scripts"] == {"longspark": "longspark_sglang.cli:main"}
    from longspark_sglang.cli import main

    assert callable(main)


def test_everything_but_serving_imports_without_sglang() -> None:
    """In a fresh process in which sglang cannot be imported, as on a training machine."""
    code = """
import importlib, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sglang":
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Block())
import longspark_sglang
for module in pkgutil.walk_packages(longspark_sglang.__path__, "longspark_sglang."):
    engine = module.name == "longspark_sglang.bench.engine_process"  # runs SGLang's scheduler
    if module.name.split(".")[1] not in ("serving", "_C") and not engine:
        importlib.import_module(module.name)
        print(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {"longspark_sglang.ops", "longspark_sglang.config"} <= set(done.stdout.split())


def test_only_serving_mentions_sglang_in_an_import() -> None:
    """Also inside functions: what needs SGLang belongs into the one package that may.

    The exceptions are `longspark check`, which looks at an installation of SGLang from outside, and
    the two modules of `longspark bench` that drive SGLang: its scheduler and its bench_serving.
    """
    outside = {"check.py", "bench/engine_process.py", "bench/serving_client.py"}
    guilty = []
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] == "serving" or inside.as_posix() in outside:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            guilty += [
                f"{path.name}:{node.lineno}" for name in names if name.split(".")[0] == "sglang"
            ]
    assert not guilty


def test_no_tracked_file_names_a_machine_or_an_index() -> None:
    here = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in tracked_files()
        if path != here  # its pattern matches itself
        for match in MACHINE_SPECIFIC.finditer(path.read_bytes())
    ]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        b"cd /home/someone/longspark",
        b"pip install --extra-index-url=x",
        b"https://pypi.example.org/simple",
    ],
)
def test_the_pattern_finds_what_it_is_for(text: bytes) -> None:
    assert MACHINE_SPECIFIC.search(text)


def test_tracked_files_are_small() -> None:
    """Models and results are made or fetched, not committed; but for the demo drafter."""
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in tracked_files()}
    embedded = sum(size for path, size in sizes.items() if EMBEDDED in path.parents)
    assert 0 < embedded < MAX_EMBEDDED
    big = {path for path, size in sizes.items() if size > MAX_FILE and EMBEDDED not in path.parents}
    assert not big


def test_constraints_pin_only_what_pyproject_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins)
    asked = project("pyproject.toml")
    wanted = [*asked["dependencies"], "setuptools", "wheel"]
    for extra in asked["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[^\w-]", item)[0] for item in wanted}
    assert {pin.split("==")[0] for pin in pins} <= names
