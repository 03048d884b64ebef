"""Builds the compiled operators, `longspark_sglang._C`; everything else is in pyproject.toml.

LONGSPARK_BUILD says what to build:
  none   nothing; the plain-torch references serve
  cpu    the fast CPU operators (any C++20 compiler)
  cuda   the CPU operators and the CUDA kernels (nvcc of torch's CUDA release)
  auto   the default: cuda where a CUDA device and nvcc are, else cpu where a C++ compiler is,
         else none. A compilation that fails is a warning and ends in none; with an explicit
         choice it is an error.
LONGSPARK_CUDA_ARCHS, e.g. "80;90a", names the GPU architectures (default: those of the GPUs
present, else every one the kernels are tested to compile for). MAX_JOBS bounds the compiler
processes. Torch must be importable while building, so install with --no-build-isolation.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
CHOICES = ("auto", "none", "cpu", "cuda")
CUDA_ARCHS = ("80", "89", "90a", "100a", "120a")
BUILD_COMMANDS = {"build_ext", "build", "bdist_wheel", "editable_wheel", "develop", "install"}


def say(text):
    print(f"[longspark] {text}", file=sys.stderr, flush=True)


def compiler():
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def why_not_cuda(torch, cpp_extension):
    """Why `auto` doesn't build the CUDA kernels; empty if it does."""
    if not torch.version.cuda:
        return "this torch has no CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if cpp_extension.CUDA_HOME is None or not shutil.which(f"{cpp_extension.CUDA_HOME}/bin/nvcc"):
        return "no nvcc found; set CUDA_HOME"
    return ""


def decide(asked):
    """What to build ("none", "cpu" or "cuda") and the reason."""
    if asked not in CHOICES:
        sys.exit(f"LONGSPARK_BUILD is {asked!r}; use one of {', '.join(CHOICES)}")
    if asked == "none":
        return "none", "asked for"
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        if asked != "auto":
            sys.exit(
                f"LONGSPARK_BUILD={asked} needs torch while building ({error}); install torch and "
                "use pip install --no-build-isolation"
            )
        return "none", "torch can't be imported while building; use --no-build-isolation"
    if compiler() is None:
        if asked != "auto":
            sys.exit(f"LONGSPARK_BUILD={asked} needs a C++ compiler; install g++ or set CXX")
        return "none", "no C++ compiler found"
    if asked != "auto":
        return asked, "asked for"
    reason = why_not_cuda(torch, cpp_extension)
    return ("cpu", reason) if reason else ("cuda", "a CUDA device and nvcc are here")


def sources(folder, *suffixes):
    found = [path for suffix in suffixes for path in (ROOT / folder).glob(f"*{suffix}")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def gencode():
    """nvcc's architecture flags."""
    import torch

    named = os.environ.get("LONGSPARK_CUDA_ARCHS", "")
    archs = [arch for arch in named.replace(",", ";").split(";") if arch]
    if not archs and torch.cuda.is_available():
        present = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        archs = sorted(f"{major}{minor}" for major, minor in present)
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs or CUDA_ARCHS]


def extension(build):
    """The one extension module and the command that compiles it."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    cxx = [
        "-O3",
        "-g0",
        "-std=c++20",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
    ]
    include = [str(ROOT / "csrc" / "include"), str(ROOT / "csrc")]
    files = ["csrc/schemas.cpp", *sources("csrc/cpu", ".cpp")]
    if build == "cpu":
        return (
            CppExtension(
                "longspark_sglang._C", files, include_dirs=include, extra_compile_args={"cxx": cxx}
            ),
            BuildExtension,
        )
    nvcc = ["-O3", "-std=c++20", "--threads=2", "-lineinfo", *gencode()]
    return (
        CUDAExtension(
            "longspark_sglang._C",
            [*files, "csrc/bindings.cpp", *sources("csrc", ".cu")],
            include_dirs=include,
            extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        ),
        BuildExtension,
    )


def forgiving(command):
    """`command`, but a failed compilation is a warning (for LONGSPARK_BUILD=auto)."""

    class Forgiving(command):
        def run(self):
            try:
                super().run()
            except Exception as error:
                say(f"WARNING: the compiled operators could not be built: {error}")
                say("WARNING: installing without them; the plain-torch references will serve.")
                say("WARNING: LONGSPARK_BUILD=cpu or cuda makes this an error with the details.")
                self.extensions = []

    return Forgiving


def main():
    asked = os.environ.get("LONGSPARK_BUILD", "auto")
    building = BUILD_COMMANDS.intersection(sys.argv)
    if not building:  # metadata only: nothing to decide, torch need not be there
        setup()
        return
    build, reason = decide(asked)
    say(f"compiled operators: {build} ({reason})")
    if build == "none":
        # An editable install would go on loading what an earlier one left.
        for stale in (ROOT / "python/longspark_sglang").glob("_C*.so"):
            stale.unlink()
        setup()
        return
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    module, command = extension(build)
    if asked == "auto":
        command = forgiving(command)
        module.optional = True
    setup(ext_modules=[module], cmdclass={"build_ext": command})


main()
