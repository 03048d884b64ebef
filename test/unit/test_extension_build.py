"""What setup.py decides to compile, and what it says when that fails."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build(monkeypatch):
    spec = importlib.util.spec_from_file_location("longspark_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refusal(build, asked):
    with pytest.raises(SystemExit) as info:
        build.decide(asked)
    return str(info.value)


def test_none_needs_nothing(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert build.decide("none") == ("none", "asked for")


def test_unknown_choice(build):
    assert refusal(build, "gpu") == "LONGSPARK_BUILD is 'gpu'; use one of auto, none, cpu, cuda"


def test_without_torch(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert build.decide("auto")[0] == "none"
    assert "--no-build-isolation" in build.decide("auto")[1]
    assert "LONGSPARK_BUILD=cpu needs torch while building" in refusal(build, "cpu")


def test_without_a_compiler(build, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert build.decide("auto") == ("none", "no C++ compiler found")
    assert "LONGSPARK_BUILD=cpu needs a C++ compiler" in refusal(build, "cpu")


def test_auto_without_a_device_is_cpu(build, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build.decide("auto") == ("cpu", "no CUDA device here")
    assert build.decide("cpu") == ("cpu", "asked for")


def test_auto_with_a_device_needs_its_toolkit(build, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "find_cuda", lambda: None)
    assert build.decide("auto")[0] == "cpu"
    assert "no CUDA toolkit found" in build.decide("auto")[1]
    assert refusal(build, "cuda").startswith("LONGSPARK_BUILD=cuda: no CUDA toolkit found")
    monkeypatch.setattr(build, "find_cuda", lambda: Path("/toolkit"))
    monkeypatch.setattr(build, "cuda_release", lambda toolkit: 12)
    assert build.decide("auto") == ("cpu", "/toolkit is CUDA 12, torch needs 13; set CUDA_HOME")
    assert "torch needs 13" in refusal(build, "cuda")
    monkeypatch.setattr(build, "cuda_release", lambda toolkit: 13)
    assert build.decide("auto")[0] == "cuda"


def test_a_cpu_only_torch_has_no_cuda_build(build, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert refusal(build, "cuda") == "LONGSPARK_BUILD=cuda: this torch has no CUDA"


def test_architectures(build, monkeypatch):
    monkeypatch.setenv("LONGSPARK_CUDA_ARCHS", "80;90a")
    assert build.gencode() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    monkeypatch.delenv("LONGSPARK_CUDA_ARCHS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert len(build.gencode()) == len(build.CUDA_ARCHS)


def run_setup(tmp_path, asked):
    """build_ext in a scratch folder with a compiler that always fails."""
    return subprocess.run(
        [
            sys.executable,
            "setup.py",
            "build_ext",
            f"--build-lib={tmp_path / 'lib'}",
            f"--build-temp={tmp_path / 'temp'}",
        ],
        cwd=ROOT,
        env={**os.environ, "LONGSPARK_BUILD": asked, "CXX": "false", "MAX_JOBS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_failed_compilation_is_an_error_if_it_was_asked_for(tmp_path):
    done = run_setup(tmp_path, "cpu")
    assert done.returncode != 0
    assert "[longspark] compiled operators: cpu (asked for)" in done.stderr


def test_a_failed_compilation_is_a_warning_otherwise(tmp_path):
    done = run_setup(tmp_path, "auto")
    assert done.returncode == 0, done.stderr
    assert "WARNING: the compiled operators could not be built" in done.stderr
    assert "the plain-torch references will serve" in done.stderr
    assert not list(tmp_path.rglob("*.so"))
