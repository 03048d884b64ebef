# make serve   install everything, start SGLang with LONGSPARK, print how to talk to it
#              MODEL= DRAFT=  folders or hub ids     PORT=30000     ARGS="more SGLang options"
# make pair    make the demo drafter again: prompts, answers, training (hours without a GPU)
#              WORK=build/pair     ARGS="--prompts 1600"
# make test    install everything, run the tests     TESTS=test/unit     TEST_ARGS="-x -k name"     JOBS=2
# make lint    ruff, mypy, clang-format
# make cuda-compile  compile the kernels for every GPU architecture, compare with their budget (no GPU)
# make gate    longspark bench regress on the tests' tiny pair     GATE_ARGS="--max-slowdown 1.10"
# make gpu-check     on a GPU: build, test, sanitize, time the kernels; writes benchmark/results
# make sanitize      run the kernels' source on the CPU under AddressSanitizer and UBSan
# make clean   remove everything that the others made in this folder
#
# VENV= names the virtual environment (11 GB, for SGLang comes with its CUDA libraries).

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
PORT ?= 30000
TESTS ?= test
# Two test processes: starting a server is half waiting, half one busy core.
JOBS ?= 2
BIN := $(VENV)/bin

# The compiler's ninja is a console script of the environment.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: install serve pair test lint cuda-compile sanitize gpu-check clean
.DEFAULT_GOAL := install

install:
	@$(PYTHON) -c 'import tomllib' 2>/dev/null || \
		{ echo "Python 3.11 or later is needed: name one with PYTHON="; exit 1; }
	@$(PYTHON) tools/install.py $(VENV)

serve: install
	@exec $(BIN)/python examples/serve.py --model '$(MODEL)' --draft '$(DRAFT)' --port $(PORT) $(ARGS)

WORK ?= build/pair
pair: install
	$(BIN)/python examples/make_pair.py --work '$(WORK)' $(ARGS)

# Torch's threads wait by spinning, so more of them than cores, over all processes, are very slow.
test: export OMP_NUM_THREADS ?= 1
test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		$(TESTS) $(TEST_ARGS)

# Two engines in turns. The baseline's ratios are of one machine, hence the room for other ones.
GATE_ARGS ?= --max-slowdown 1.25 --accept-tolerance 0.06
gate: install
	$(BIN)/python benchmark/small.py regress $(GATE_ARGS)

lint: install
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@find csrc -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' -o -name '*.h' \
		| xargs --no-run-if-empty --verbose $(BIN)/clang-format --dry-run -Werror

cuda-compile: install
	$(BIN)/python csrc/compile_cuda.py

# Python itself isn't instrumented, so the sanitizers' libraries are loaded before it.
sanitize: export OMP_NUM_THREADS ?= 1
sanitize: install
	$(BIN)/python csrc/host_emulation/build.py --sanitize
	LONGSPARK_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest test/ops -k 'emulation or kernel_orders' $(TEST_ARGS)

# Not through `install`: a GPU box needs torch and a CUDA toolkit for this, not SGLang.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check:
	PYTHONPATH=python $(GPU_PYTHON) benchmark/gpu_check.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf *.egg-info python/*.egg-info cpu_platform/*.egg-info cpu_platform/build
	rm -f python/longspark_sglang/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
