# Two commands for a fresh machine: `make train` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup setup-test train test types site test-slow test-gpu engines test-engines docs format clean

# What runs need, and beside it what tests need: a machine that only trains installs the first.
setup: $(VENV)/.ready
setup-test: $(VENV)/.test-ready

PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) --editable .
	touch $@

$(VENV)/.test-ready: $(VENV)/.ready
	$(PIP) --editable ".[test]"
	touch $@

train: setup
	$(BIN)/windlass train gpt-tiny train.optimizer=muon train.learning_rate=0.01 train.steps=120
	@echo "        . $(BIN)/activate     lets this shell find windlass"

test: setup-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory --jobs 2 types site
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow and not gpu"

types: setup-test
	$(BIN)/mypy

site: setup-test
	$(BIN)/mkdocs build --quiet --strict

test-slow: setup-test
	$(BIN)/pytest -m "slow and not gpu"

# Only where torch sees a GPU; without one all are skipped.
test-gpu: setup-test
	$(BIN)/pytest -m gpu

# Engines of others, each in an environment of its own: Windlass never imports one.
ENGINES := .venv-engines
ENGINE_PIP = -m pip install --disable-pip-version-check --constraint constraints-engines.txt

engines: $(foreach name,torchtitan megatron-core deepspeed automodel,$(ENGINES)/$(name)/.ready)

# Without its dependencies, of which the parser needs few.
$(ENGINES)/torchtitan/.ready: constraints-engines.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(ENGINE_PIP) torch numpy tyro "datasets<4.8" tokenizers safetensors tensorboard einops pillow spmd_types torchdata torch_checkpointing torchao
	$(@D)/bin/python $(ENGINE_PIP) --no-deps torchtitan
	touch $@

$(ENGINES)/megatron-core/.ready: constraints-engines.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(ENGINE_PIP) torch numpy megatron-core
	touch $@

$(ENGINES)/deepspeed/.ready: constraints-engines.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(ENGINE_PIP) torch numpy setuptools wheel
	$(@D)/bin/python $(ENGINE_PIP) --no-build-isolation deepspeed
	touch $@

$(ENGINES)/automodel/.ready: constraints-engines.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(ENGINE_PIP) torch numpy pyyaml transformers==5.18.0 torchdata datasets
	$(@D)/bin/python $(ENGINE_PIP) --no-deps nemo-automodel megatron-fsdp
	touch $@

# Those that are not installed are skipped.
test-engines: setup-test engines
	$(BIN)/pytest -m engines

docs: setup-test
	$(BIN)/mkdocs serve

format: setup-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
