"""Builds the compiled operators, `longspark_sglang._C`; everything else is in pyproject.toml.

LONGSPARK_BUILD says what to build:
  none   nothing; the plain-torch references serve
  cpu    the fast CPU operators (any C++20 compiler)
  cuda   the CPU operators and the CUDA kernels (a CUDA toolkit of torch's major release)
  auto   the default: cuda where a CUDA device and its toolkit are, else cpu where a C++ compiler
         is, else none. A compilation that fails is a warning and ends in none; with an explicit
         choice it is an error.
LONGSPARK_CUDA_ARCHS, e.g. "80;90a", names the GPU architectures (default: those of the GPUs
present, else every one the kernels are tested to compile for). MAX_JOBS bounds the compiler
processes. Torch must be importable while building, so install with --no-build-isolation.
"""

import importlib.util
import os
import re
import shutil
import subprocess
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


def find_cuda():
    """The CUDA toolkit's folder: CUDA_HOME, that of nvcc on PATH, /usr/local/cuda, or the one that
    pip installed next to torch (SGLang brings it). None if there is none."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path).resolve().parent.parent)
    candidates.append("/usr/local/cuda")
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package else []:
        candidates += sorted(Path(folder).glob("cu[0-9]*"), reverse=True)
    # The header tells a toolkit from a mere nvcc on PATH.
    parts = ("bin/nvcc", "include/cuda_runtime_api.h")
    for folder in (Path(candidate) for candidate in candidates if candidate):
        if all((folder / part).exists() for part in parts):
            return folder
    return None


def cuda_release(toolkit):
    """The toolkit's major release, e.g. 13."""
    text = subprocess.run(
        [toolkit / "bin/nvcc", "--version"], capture_output=True, text=True, check=True
    ).stdout
    return int(re.search(r"release (\d+)", text).group(1))


def why_not_cuda(torch):
    """Why the CUDA kernels can't be built; empty if they can."""
    if not torch.version.cuda:
        return "this torch has no CUDA"
    toolkit = find_cuda()
    if toolkit is None:
        return "no CUDA toolkit found; install one or set CUDA_HOME"
    wanted = int(torch.version.cuda.split(".")[0])
    if cuda_release(toolkit) != wanted:
        return f"{toolkit} is CUDA {cuda_release(toolkit)}, torch needs {wanted}; set CUDA_HOME"
    return ""


def decide(asked):
    """What to build ("none", "cpu" or "cuda") and the reason."""
    if asked not in CHOICES:
        sys.exit(f"LONGSPARK_BUILD is {asked!r}; use one of {', '.join(CHOICES)}")
    if asked == "none":
        return "none", "asked for"
    try:
        import torch
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
    if asked == "cpu":
        return "cpu", "asked for"
    reason = why_not_cuda(torch)
    if asked == "cuda":
        if reason:
            sys.exit(f"LONGSPARK_BUILD=cuda: {reason}")
        return "cuda", "asked for"
    if not torch.cuda.is_available():
        reason = "no CUDA device here"
    return ("cpu", reason) if reason else ("cuda", "a CUDA device and its toolkit are here")


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
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    cxx = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden"]
    cxx += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-psabi"]
    cxx += ["-fopenmp"]  # at::parallel_for runs serially in code compiled without
    files = ["csrc/schemas.cpp", *sources("csrc/cpu", ".cpp")]
    options = {
        "include_dirs": [str(ROOT / "csrc/include"), str(ROOT / "csrc")],
        "extra_compile_args": {"cxx": cxx},
        "extra_link_args": ["-fopenmp"],
    }
    if build == "cuda":
        toolkit = Path(os.environ["CUDA_HOME"])
        files += ["csrc/bindings.cpp", *sources("csrc", ".cu")]
        options["include_dirs"].append(str(toolkit / "include"))
        nvcc = ["-O3", "-std=c++20", "--threads=2", "-lineinfo", *gencode()]
        options["extra_compile_args"]["nvcc"] = nvcc
        options["libraries"] = ["c10_cuda", "torch_cuda"]
        # By its file: the pip-installed toolkit has the library but not the name to link by.
        runtime = [p for lib in ("lib64", "lib") for p in (toolkit / lib).glob("libcudart.so*")]
        options["extra_link_args"].append(str(sorted(runtime)[0]))
    return CppExtension("longspark_sglang._C", files, **options), BuildExtension


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
    if build == "cuda":
        os.environ["CUDA_HOME"] = str(find_cuda())  # where torch's build command looks for nvcc
    module, command = extension(build)
    if asked == "auto":
        command = forgiving(command)
        module.optional = True
    setup(ext_modules=[module], cmdclass={"build_ext": command})


if __name__ == "__main__":
    main()
