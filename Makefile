# Every command of the project. A target first brings the virtual environment up to date: created by the standard library's
# venv, filled by pip with exactly the versions of constraints.txt. Nothing is compiled. pip's own configuration decides
# where packages come from; docs/install.md says how to take the CPU build of torch.
#
#   make test ARGS="-k quantize"      ARGS is appended to the command of train, test, test-slow, bench, estimators and convergence
#   make test VENV=/elsewhere/venv    another place for the environment
#   make test PYTHON=python3.12       another interpreter to create it with (3.11 or newer)
#   make same-loss BASE=main          the commit to compare with
#   make test WORKERS=1               processes among which the tests are shared
#   make train OUTPUT=runs/mine       the run folder; a new one each time if not given

PYTHON ?= python3
VENV ?= .venv
BASE ?= main
ARGS ?=
WORKERS ?= 2
CONSTRAINTS ?= constraints.txt
OUTPUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

OLDEST_TORCH := 2.11.0
# What torch 2.11 comes with; its interpreter needs NumPy below 2.4, and torch 2.11 setuptools below 82.
OLDEST_TRITON := 3.6.0

# Of `make dry-run`: whose counts are compared, 2.13 or 2.11; and its environment.
TORCH ?= 2.13
DRY_RUN ?= .venv-dry-run-$(TORCH)

BIN := $(VENV)/bin
TRAINING := $(VENV)/.installed-train
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)/.installed-peers
DOCS := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install train train-2 test test-slow test-plain-cpu test-ranks test-benchmarks oldest check docs format bench bench-cola bench-cpu bench-cumulative bench-emulation bench-memory bench-tokenize bench-optimizer bench-training-bytes bench-int4 bench-gpu pretraining mutations sanitize dry-run estimators same-loss convergence optimizer-convergence clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 18

install: $(TRAINING) ## what training needs, in .venv: two minutes

train: $(TRAINING) ## train the demo model of examples/demo.toml and write its report
	$(BIN)/narrowgauge train examples/demo.toml --output $(OUTPUT) $(ARGS)

train-2: $(TRAINING) ## the same on two processes: torchrun, each with half of every batch
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m narrowgauge train examples/demo.toml --output $(OUTPUT) $(ARGS)

# worksteal: a process that is done takes tests from another, so no test may count on those before it in its file. Byte code is kept
# whatever the shell says: each of the processes that tests start would compile the package again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What it lists at the end is what to shorten next, or to mark slow where another test sees the same fault.
test: $(INSTALLED) ## the test suite in WORKERS processes (2); tests that need a GPU are skipped, with a line, where there is none
	$(PYTEST) -m "not slow" --durations=20 --durations-min=3 $(ARGS)

test-slow: $(INSTALLED) ## the tests that `make test` leaves out: whole matrices of casts and GPUs, long runs, benchmarks
	$(PYTEST) -m "slow and not ranks" $(ARGS)

test-plain-cpu: ## both as on a CPU without bfloat16, VNNI and AVX-512 instructions
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(MAKE) test test-slow

test-ranks: $(INSTALLED) ## what is slow on several ranks: every recipe on every mesh; half an hour
	$(PYTEST) -m ranks $(ARGS)

test-benchmarks: $(INSTALLED) ## of those, the tests of benchmarks/
	$(PYTEST) -m benchmark $(ARGS)

oldest: ## the suite with the oldest torch and Triton that are supported, in .venv-oldest; gigabytes, PyPI's torch is the CUDA build
	mkdir -p .venv-oldest
	sed -e 's/^torch==.*/torch==$(OLDEST_TORCH)/' -e 's/^numpy==.*/numpy<2.4/' -e 's/^setuptools==.*/setuptools<82/' constraints.txt > .venv-oldest/constraints.txt
	echo 'triton==$(OLDEST_TRITON)' >> .venv-oldest/constraints.txt
	$(MAKE) test test-slow VENV=.venv-oldest CONSTRAINTS=.venv-oldest/constraints.txt

# Constraints of constraints-cuda-*.txt first, then those of constraints.txt that they leave open.
dry-run: ## what training steps launch, move and wait for on a GPU, counted without one; gigabytes, PyPI's torch is the CUDA build; TORCH=2.11
	mkdir -p $(DRY_RUN)
	{ cat constraints-cuda-$(TORCH).txt; \
	  grep -vE "^($$(sed -nE 's/^([a-z0-9-]+)[=<].*/\1/p' constraints-cuda-$(TORCH).txt | paste -sd '|'))==" constraints.txt; } > $(DRY_RUN)/both.txt
	cmp -s $(DRY_RUN)/both.txt $(DRY_RUN)/constraints.txt || cp $(DRY_RUN)/both.txt $(DRY_RUN)/constraints.txt
	$(MAKE) $(DRY_RUN)/.installed-peers VENV=$(DRY_RUN) CONSTRAINTS=$(DRY_RUN)/constraints.txt
	$(DRY_RUN)/bin/python -m tests.gpu_dry_run $(ARGS)

check: $(INSTALLED) ## format, lint, language, structure, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/language.py --check
	$(BIN)/python scripts/structure.py --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(DOCS) ## the site of docs/ in site/: pages by task, API, search; a dead link is an error. To look: python3 -m http.server -d site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

wheel: $(INSTALLED) ## a wheel for this kind of processor in dist/, with the C++ kernels compiled: its users need no compiler
	$(BIN)/python scripts/wheel.py $(ARGS)

format: $(INSTALLED) ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(PEERS) ## every benchmarks/bench_*.py; results are appended to benchmarks/results/
	@set -e; for file in benchmarks/bench_*.py; do \
	  test -e "$$file" || { echo "No benchmarks/bench_*.py in this tree." >&2; exit 1; }; \
	  echo "== $$file"; $(BIN)/python -m "benchmarks.$$(basename "$$file" .py)" $(ARGS); \
	done

bench-cpu: $(INSTALLED) ## training steps on this machine's CPU: INT8 beside torch's bf16 autocast, in five minutes
	$(BIN)/python -m benchmarks.bench_cpu $(ARGS)

bench-emulation: $(PEERS) ## what emulating the narrow formats costs on this machine's CPU
	$(BIN)/python -m benchmarks.bench_emulation $(ARGS)

estimators: $(INSTALLED) ## variance, cosine and slope of the 4-bit estimates of a gradient
	$(BIN)/python -m benchmarks.estimators $(ARGS)

bench-memory: $(PEERS) ## what each memory technique saves and costs
	$(BIN)/python -m benchmarks.bench_memory $(ARGS)

bench-cola: $(PEERS) ## fine-tuning on CoLA beside transformers.Trainer: speed and quality; ARGS="--data FOLDER"
	$(BIN)/python -m benchmarks.cola_speed $(ARGS)

bench-cumulative: $(PEERS) ## memory, speed and metric of a fine-tune, one technique more in each row
	$(BIN)/python -m benchmarks.cumulative $(ARGS)

bench-tokenize: $(INSTALLED) ## how fast text becomes ids: one row per call, and batched
	$(BIN)/python -m benchmarks.bench_tokenize $(ARGS)

bench-optimizer: $(PEERS) ## the time and memory of AdamW with narrow states on this machine's CPU
	$(BIN)/python -m benchmarks.bench_optimizer $(ARGS)

bench-training-bytes: $(PEERS) ## what a parameter of a real model takes in training: weight, master, gradient, state
	$(BIN)/python -m benchmarks.bench_training_bytes $(ARGS)

bench-int4: $(PEERS) ## a training step in 4-bit integers on this machine's CPU, and what it keeps for backward
	$(BIN)/python -m benchmarks.bench_int4 $(ARGS)

bench-gpu: $(PEERS) ## what narrowgauge gains on one GPU, in under nine minutes; ARGS=--dry-run tries it anywhere
	$(BIN)/python -m benchmarks.gpu $(ARGS)

same-loss: $(INSTALLED) ## 50 training steps here and at BASE: the losses must be equal to the last bit
	$(BIN)/python -m benchmarks.same_loss --base $(BASE)

convergence: $(INSTALLED) ## the loss curves of the recipes beside BF16
	$(BIN)/python -m benchmarks.convergence $(ARGS)

mutations: $(INSTALLED) ## would the tests notice? fifty seeded one-line faults, one at a time (ARGS="--areas product": in other folders); an hour
	$(BIN)/python -m benchmarks.mutations $(ARGS)

sanitize: $(INSTALLED) ## every kernel under compute-sanitizer, on a GPU
	$(BIN)/python -m tests.sanitized $(ARGS)

pretraining: $(INSTALLED) ## a Llama of 124 million parameters on 0.1 billion tokens, each recipe beside BF16; wants a GPU
	$(BIN)/python -m benchmarks.pretraining $(ARGS)

optimizer-convergence: $(PEERS) ## the loss with narrow optimizer states beside float32 ones
	$(BIN)/python -m benchmarks.optimizer_convergence $(ARGS)

clean: ## remove caches and build products; the environment and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find narrowgauge tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# What training needs, which scripts/install_size.py counts; INSTALLED adds what the tests and the checks need.
$(TRAINING): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "narrowgauge: no '$(PYTHON)' found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "narrowgauge needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1). Name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[train]'
	@touch $@

$(INSTALLED): $(TRAINING)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[train,evaluate,dev]'
	@touch $@

# Peers that benchmarks compare with. Apart from the rest because transformers imports torchao wherever it is installed, which
# costs every start of `narrowgauge train` two seconds and prints its warnings.
$(PEERS): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[bench]'
	@touch $@

$(DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@
