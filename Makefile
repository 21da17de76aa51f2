# Needs Python 3.11 or later with its venv module, and a package index to install from.
#   make PYTHON=/path/to/python3.12 test     picks the interpreter
#   make JOBS=1 test                         picks the number of test processes
#   make TESTS='not long' test               leaves the longest out, as .ci/run does
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --no-input --disable-pip-version-check
JOBS ?= auto
TESTS ?=

# Tables of many megabytes, read at random places, take half the time in large pages of memory, on
# Linux, where glibc asks for them. Without, it is chance which run gets them.
LARGE_PAGES := GLIBC_TUNABLES=glibc.malloc.hugetlb=1

# One stamp a set of extras; each is older than pyproject.toml when it has to be made again.
READY := $(VENV)/.ready
DEMO := $(VENV)/.installed-demo
BENCH := $(VENV)/.installed-bench
DOCS := $(VENV)/.installed-docs
PEERS := $(VENV)/.installed-peers
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.NOTPARALLEL: # one pip at a time in one environment
.PHONY: help demo test lint types format api docs package hooks matrix mutants soak bench bench-check peers clean

help: ## Say what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-19s %s\n", $$1, $$2}'

demo: $(DEMO) ## Replay 1,000 requests of a real trace in 40 GiB of KV
	$(BIN)/swa-jax replay mooncake-conversation --model gpt-oss-20b --hbm 40GiB

test: $(DEV) ## Run the tests, the docstring examples and the notebooks
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --benchmark-disable --nbmake $(if $(TESTS),-m '$(TESTS)')

lint: $(DEV) ## Check style, formatting and that notebooks hold no outputs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --keep-id --verify notebooks/*.ipynb
	$(BIN)/pre-commit validate-config

types: $(DEV) ## Check types
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV) ## Rewrite sources and notebooks in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/nbstripout --keep-id notebooks/*.ipynb

api: $(READY) ## Accept a change of the public API (tests/public_api.txt)
	$(BIN)/python tests/public_api.py

docs: $(DOCS) ## Build the site into site/; with OUTPUTS=1 notebooks show theirs
	$(if $(OUTPUTS),SWA_JAX_NOTEBOOK_OUTPUTS=1) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(DEV) ## Build sdist and wheel, install into an empty place, try it
	$(BIN)/python .ci/package.py

hooks: $(DEV) ## Have git check each commit (.pre-commit-config.yaml)
	$(BIN)/pre-commit install

matrix: ## Test each Python 3.11 to 3.13 with the oldest and newest JAX
	@for python in python3 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then exec "$$python" .ci/matrix.py; fi; \
	done; \
	echo "no Python 3.11 or later found" >&2; exit 1

mutants: $(DEV) ## Change the source in small ways: do the tests notice?
	mkdir -p .benchmarks
	$(BIN)/python -m tests.mutation --one-in $(or $(ONE_IN),16) --jobs 2 --json .benchmarks/mutants.json

soak: $(DEV) ## Serve 1,000,000 mixed requests, laws checked after every step
	mkdir -p .benchmarks
	$(BIN)/python -m tests.soaking --json .benchmarks/soak.json

bench: $(BENCH) ## Time all beside other engines, into benchmarks/results
	$(LARGE_PAGES) $(BIN)/python -m benchmarks.transitions --results benchmarks/results
	$(LARGE_PAGES) $(BIN)/python -m benchmarks.prefix_cache --results benchmarks/results
	$(LARGE_PAGES) $(BIN)/python -m benchmarks.whole_replay --results benchmarks/results

bench-check: $(BENCH) ## Time again: is any slower than benchmarks/results has it?
	$(LARGE_PAGES) $(BIN)/python -m benchmarks.transitions --results .benchmarks/new
	$(BIN)/python -m benchmarks.check .benchmarks/new/transitions.json

peers: $(PEERS) ## Install sglang's allocator, to compare with

clean: ## Remove environments, caches and build outputs
	rm -rf $(VENV) .matrix build dist site .benchmarks .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY):
	@found=; \
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "swa_jax needs Python 3.11 or later; none found as $(or $(PYTHON),python3 or python3.11 to python3.14)." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found has no venv module. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv --clear $(VENV)
	@touch $@

$(DEMO): $(READY) pyproject.toml
	@echo "Installing swa_jax for the demo"
	@$(PIP) install -e '.[cli,plot]'
	@touch $@

$(BENCH): $(READY) pyproject.toml
	@echo "Installing swa_jax for the benchmarks"
	@$(PIP) install -e '.[bench,cli,plot]'
	@touch $@

$(DOCS): $(READY) pyproject.toml
	@echo "Installing swa_jax for the documentation"
	@$(PIP) install -e '.[docs]'
	@touch $@

$(PEERS): $(READY) pyproject.toml
	@echo "Installing sglang's allocator and what it imports"
	@$(PIP) install -e '.[peers]'
	@$(PIP) install --no-deps sglang==0.5.23
	@touch $@

# The dev extra holds what the others need, so their stamps are due too.
$(DEV): $(READY) pyproject.toml
	@echo "Installing swa_jax for development"
	@$(PIP) install -e '.[dev]'
	@touch $(DEMO) $(BENCH) $(DOCS) $@
