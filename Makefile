# The index of commands. `make help` lists them; what they do is in Python.

PYTHON ?= python3
.DEFAULT_GOAL := help

# PY: use this interpreter as it is and make no environment, e.g. on a machine with torch and Triton built for its GPUs.
# Otherwise everything runs in .venv, which is made at the first use and again when its inputs change: with what runs and
# measures kernels, or also with the tools of tests and lint.
ifdef PY
READY :=
READY_DEV :=
else
PY := .venv/bin/python
READY := .venv/.ready
READY_DEV := .venv/.ready-dev
endif

# Where there is ROCm and no nvidia-smi, the package index has no torch for the GPUs.
ROCM ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || command -v rocminfo || ls -d /opt/rocm 2>/dev/null)

# What needs no GPU takes any torch.
READY_ANYWHERE := $(if $(ROCM),$(READY_DEV),$(READY))

# Tests at once, one a core within bounds: a file of tests keeps its ranks and its compiled kernels for itself.
JOBS ?= $(shell $(PYTHON) -c "import os; print(max(2, min(4, os.cpu_count() or 2)))")

# GPU tests at once: they compile for most of their time, and their ranks take turns on the GPUs. Each job's ranks keep
# heaps of 3 GiB: on four GPUs of 80 GB six jobs passed, and of ten some failed.
GPU_JOBS ?= 3

# What a sweep measures. Without NP: every GPU, or 4 ranks on the CPU.
NP ?=
SHAPES ?= smoke
OUT ?= results/local/$(or $(FAMILY),all)-$(SHAPES).csv
SWEEP = $(PY) -m iris_bench run --shapes $(SHAPES) $(if $(FAMILY),--family $(FAMILY)) \
	$(if $(VARIANT),--variant $(VARIANT)) $(if $(DTYPE),--dtype $(DTYPE)) $(if $(NP),--world-size $(NP)) \
	--out $(OUT) --plot $(basename $(OUT)).png

# Everything that the report shows, or a part of it: bench/suite/plan.py.
MEASURE = $(PY) -m iris_bench measure $(if $(NP),--world-size $(NP)) $(if $(FOR),--for $(FOR))

# What a target that needs GPUs does first.
define ENOUGH_GPUS
@$(PY) -c 'import sys, torch; sys.exit(torch.cuda.device_count() * $(or $(IRIS_RANKS_PER_GPU),1) < $(or $(NP),1))' || \
	{ echo "make: torch sees too few GPUs here for $(or $(NP),1) ranks" >&2; exit 1; }
endef

.PHONY: help setup bench test test-quick test-models test-gpu sweep measure paper check stress tune links litmus layers \
	decoder report predictions memcheck scale-out-test codegen-diff compare mutants docs dist lint fmt clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 names the interpreter that .venv is made with."
	@echo "  PY=python3 uses an interpreter as it is, without .venv: pip install --no-deps --no-build-isolation -e . first."
	@echo "  ARGS=... is handed on to pytest, iris-bench or what else the target runs."

setup: $(READY_DEV) ## Make .venv and install everything into it, if that was not done or its inputs changed

bench: $(READY) ## Check every family and variant on small shapes, on GPUs also time them; table, CSV and plot [NP=4]
	$(SWEEP) --overwrite $(ARGS)

# Workers and ranks share the cores: threads of one process would wait for each other. tests/conftest.py has the order.
# Hundreds of processes import the same modules: Python compiles them once, also where its environment says not to.
test: export OMP_NUM_THREADS = 1
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY_DEV) ## Run the tests that need no GPU [ARGS="-k heap"]
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-quick: export OMP_NUM_THREADS = 1
test-quick: $(READY_DEV) ## Run the tests that need neither ranks nor a compiler, for a first look
	$(PY) -m pytest -n $(JOBS) --dist loadfile -m 'not gpu and not slow' $(ARGS)

# Those that are skipped where transformers, torchao, or a browser with playwright, is not installed.
OF_MODELS = tests/tensor_parallel/test_plans_of_models.py tests/tensor_parallel/test_sequences_of_models.py \
	tests/tensor_parallel/test_tensor_parallel_float8_styles.py tests/bench/benchmarks/test_bench_decoder.py \
	tests/bench/baselines/test_decoder_async_tp.py tests/bench/tune/test_interactive.py tests/project/docs/test_docs.py

test-models: export OMP_NUM_THREADS = 1
test-models: $(READY_DEV) ## Install transformers, torchao and playwright, and run what needs them or a Chromium; none may be skipped
	$(PY) -m pip install -q -c constraints-cpu.txt -e '.[transformers,browser]' torchao
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-skips $(OF_MODELS) $(ARGS)

test-gpu: $(READY) $(READY_DEV) ## Run the tests that need GPUs; NP=4 insists on as many, else what has too few is skipped [GPU_JOBS=3]
	$(ENOUGH_GPUS)
	$(PY) -m pytest -m gpu -n $(GPU_JOBS) $(ARGS)

scale-out-test: export IRIS_SCALE_OUT_CALLS = $(or $(CALLS),67)
scale-out-test: export OMP_NUM_THREADS = 1
scale-out-test: $(READY_DEV) ## Call all families over simulated hosts, some late, killed or stopped; with 2 GPUs also there [CALLS=67 a size]
	$(PY) -m pytest tests/scale_out -m 'gpu or not gpu' $(ARGS)

sweep: $(READY) ## Measure: FAMILY=gemm_all_scatter SHAPES=square NP=4 [DTYPE=fp16] [VARIANT=] [OUT=file.csv]
	$(SWEEP) $(ARGS)

measure: OUT =
measure: $(READY) ## Measure all that the report shows, anew; the next call goes on [NP=2 FOR=8m ONLY=llama,fp8 OUT=folder ARGS=--list]
	$(MEASURE) $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT)) $(ARGS)

paper: OUT = results/local/paper$(if $(NP),-x$(NP))
paper: $(READY) ## Reproduce the paper's figures: docs/paper.md [NP=4 FOR=9m OUT=folder]
	$(ENOUGH_GPUS)
	$(MEASURE) --only links,paper --out $(OUT) $(ARGS)
	$(PY) -m iris_bench links --mib 64 $(if $(NP),--world-size $(NP)) --resume --out $(OUT)/links.csv --plot $(OUT)/links.png
	$(PY) -m iris_bench plot $(OUT)/paper-bf16.csv --over library_list --out $(OUT)/paper.png

stress: OUT = results/local/stress.csv
stress: $(READY) ## Call all operators at random, check every element: NP=4 SECONDS=60 [FAMILY=] [VARIANT=] [SEED=]
	$(PY) -m iris_bench stress $(if $(NP),--world-size $(NP)) $(if $(FAMILY),--family $(FAMILY)) \
		$(if $(VARIANT),--variant $(VARIANT)) $(if $(DTYPE),--dtype $(DTYPE)) $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(SEED),--seed $(SEED)) --out $(OUT) $(ARGS)

check: $(READY_ANYWHERE) ## Look for races, deadlocks and wrong answers without a GPU [NP=2 FAMILY= VARIANT= ARGS="--schedules 20"]
	$(PY) -m iris_bench check $(if $(NP),--world-size $(NP)) $(if $(FAMILY),--family $(FAMILY)) \
		$(if $(VARIANT),--variant $(VARIANT)) $(if $(DTYPE),--dtype $(DTYPE)) $(ARGS)

tune: SHAPES = square
tune: $(READY) ## Measure all variants for `auto` on this machine: SHAPES=llama NP=4 [FAMILY=] [DTYPE=fp16]
	$(PY) -m iris_bench tune --shapes $(SHAPES) $(if $(NP),--world-size $(NP)) $(if $(FAMILY),--family $(FAMILY)) \
		$(if $(DTYPE),--dtype $(DTYPE)) $(ARGS)

links: OUT =
links: $(READY) ## Measure stores, loads and copies between every two ranks, barriers, signals [NP=8 OUT=links.csv]
	$(PY) -m iris_bench links $(if $(NP),--world-size $(NP)) $(if $(OUT),--out $(OUT)) $(ARGS)

litmus: OUT =
litmus: $(READY) ## Try each promised ordering of the device API a million times on GPUs [NP=2 OUT=litmus.csv]
	$(PY) -m iris_bench litmus $(if $(NP),--world-size $(NP)) $(if $(OUT),--out $(OUT)) $(ARGS)

layers: OUT =
layers: $(READY) ## Measure pairs of tensor-parallel layers beside torch's own [NP=4 OUT=layers.csv]
	$(PY) -m iris_bench layers $(if $(NP),--world-size $(NP)) $(if $(OUT),--out $(OUT)) $(ARGS)

decoder: OUT =
decoder: $(READY) ## Measure a tensor-parallel Llama end to end; needs transformers [NP=2 OUT=decoder.csv ARGS="--layers 4"]
	$(PY) -m iris_bench decoder $(if $(NP),--world-size $(NP)) $(if $(OUT),--out $(OUT)) $(ARGS)

report: $(READY_ANYWHERE) ## Make docs/report.md, and all tables and pictures of README and docs, from the CSVs; no GPU
	$(PY) -m iris_bench report $(ARGS)
	$(PY) docs/img/draw_timelines.py
	$(PY) docs/img/draw_badges.py

predictions: $(READY_ANYWHERE) ## Make the table of docs/interactive from the cost model again: two minutes, no GPU
	$(PY) -m iris_bench predictions $(ARGS)

memcheck: $(READY) ## Call every variant twice under compute-sanitizer [NP=2]
	$(PY) -m iris_bench memcheck $(if $(NP),--world-size $(NP)) $(if $(FAMILY),--family $(FAMILY)) \
		$(if $(VARIANT),--variant $(VARIANT)) $(ARGS)

codegen-diff: $(READY_DEV) ## Compare the machine code of all kernels with a commit's: BASE=main [ONLY=pattern]
	$(PY) tests/golden.py diff $(or $(BASE),$(error BASE=... names the commit)) $(if $(ONLY),--only '$(ONLY)')

compare: $(READY) $(READY_DEV) ## Compare the kernels' speed with a commit's on the same GPUs: BASE=main OUT=folder [NP=2 ARGS="--shapes square"]
	$(PY) tests/compare.py $(or $(BASE),$(error BASE=... names the commit)) --out $(or $(OUT),$(error OUT=... names a new folder)) \
		$(if $(NP),--world-size $(NP)) $(ARGS)

mutants: $(READY_DEV) ## Leave out one signal, wait or fence at a time; list what no test notices [ARGS="--only PATTERN --list"]
	PYTHONPATH=tests $(PY) -m mutation $(ARGS)

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(READY_DEV) ## Build the documentation site into build/site, without network; a broken link fails
	$(PY) -m mkdocs build $(ARGS)

dist: $(READY_DEV) ## Build wheel and sdist into dist/, check them, and run the first program from the wheel
	$(PY) tests/distribution.py $(ARGS)

lint: $(READY_DEV) ## Check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

fmt: $(READY_DEV) ## Bring the code into the format that lint checks
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## Remove the environment, caches and build outputs; results/local stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.ready: EXTRAS = bench,cpu
.venv/.ready-dev: EXTRAS = dev
.venv/.ready .venv/.ready-dev: pyproject.toml constraints-cpu.txt
	@if [ "$@$(ROCM)" != "$@" ] && [ $@ = .venv/.ready ]; then \
		echo "make: there is ROCm here ($(firstword $(ROCM))); bring torch 2.11 or later built for it, with its Triton" >&2; \
		echo "  (https://pytorch.org/get-started/locally), then pip install 'setuptools>=77' markdown-it-py matplotlib pandas rich typer" >&2; \
		echo "  and pip install --no-deps --no-build-isolation -e ., and make $(MAKECMDGOALS) PY=python3" >&2; \
		exit 1; fi
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: Python 3.10 or later is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) cannot make environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@if nvidia-smi -L >/dev/null 2>&1; then \
		set -x; .venv/bin/python -m pip install -e '.[$(EXTRAS),cuda]'; \
	else \
		set -x; .venv/bin/python -m pip install -e '.[$(EXTRAS)]' -c constraints-cpu.txt; \
	fi
	@touch $@
