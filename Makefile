# Everything a newcomer types. Each target works from a fresh clone; `setup` is done once and noticed afterwards.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help setup kernels demo check test bench soak clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup:  ## virtual environment with anyrig in it (.venv); TORCH_INDEX_URL picks a CUDA or ROCm torch
	@VENV=$(VENV) scripts/setup.sh

kernels:  ## compile the CPU kernels again (ISA=avx512: one of them; SANITIZE=address,undefined: with sanitizers)
	@VENV=$(VENV) ISA=$(ISA) SANITIZE=$(SANITIZE) scripts/setup.sh kernels

demo: setup  ## label real text with the default model, and show how good and how fast that was
	@$(BIN)/python examples/demo.py

check: setup  ## ruff, mypy, import directions
	@$(BIN)/ruff format --check --quiet . || { echo "formatting differs: run $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest tests/unit/test_imports.py

test: check  ## all checks and tests (no GPU needed)
	@$(BIN)/anyrig -q pull smollm2-135m > /dev/null
	@$(BIN)/anyrig -q pull gemma3-270m > /dev/null
	@$(BIN)/python -m pytest

bench: setup  ## engine against Transformers' generate on the same work, in turn; perplexity of int8 and int4
	@$(BIN)/python -m anyrig.bench.against_transformers
	@$(BIN)/anyrig -q eval perplexity smollm2-135m --quantize all

SOAK ?= address,undefined
soak:  ## random requests against kernels built with sanitizers (MINUTES=10, SEED=1; SOAK=thread, SOAK=none: as they are)
	@VENV=$(VENV) ISA= SANITIZE= scripts/setup.sh
	@nice -n 10 $(BIN)/python dev/soak.py --sanitize $(SOAK) --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1)

clean:  ## remove the environment and what tools left behind (models stay in the cache)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
