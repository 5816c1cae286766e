# Every command does all of its own set-up: `make train`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS := constraints/python$(VERSION).txt
NODEPS := constraints/nodeps-python$(VERSION).txt
ifeq ($(wildcard $(CONSTRAINTS)),)
$(error $(PYTHON) is Python $(VERSION); supported: $(patsubst constraints/python%.txt,%,$(wildcard constraints/python*)). Pass PYTHON=python3.12, say)
endif
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo ,gpu)
ARGS ?=

.PHONY: help install train test fuzz kernels lint types bench pictures examples docs docs-serve dist release-check clean

help:
	@echo 'make train   swap, tune and train a byte-level GPT on real text (ARGS="--size small --compare" ...)'
	@echo 'make test    run the tests;  make kernels: compile every candidate of the GPU kernels;  make fuzz: damage files'
	@echo 'make lint    ruff;  make types: pyright;  make bench: the CPU benchmarks'
	@echo 'make docs    the site, into site/;  make docs-serve: shows it while you write'
	@echo 'make dist    wheel and sdist, into dist/;  make release-check: installs the wheel alone, and runs it'
	@echo 'make pictures   draws the pictures of the docs from docs/benchmarks;  make examples: runs them for docs/examples.md'

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) $(NODEPS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[dev$(GPU)]'
	$(PIP) --no-deps --requirement $(NODEPS)
	@touch $@

$(VENV)/installed-%: pyproject.toml $(CONSTRAINTS) | install
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[$*]'
	@touch $@

train: install
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -q $(ARGS)

fuzz: install
	$(BIN)/python -m pytest -n 2 -q -m fuzz tests/test_fuzz_*.py tests/test_labels.py $(ARGS)

kernels: install
	$(BIN)/python -m pytest -n 2 -q -m kernels tests/test_compiled.py tests/test_ops_compiled.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: install
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/attention_cpu.py
	for op in linear gated_linear norm rotary linear_cross_entropy; do $(BIN)/python benchmarks/$${op}_cpu.py || exit 1; done

docs docs-serve: export NO_MKDOCS_2_WARNING = 1 # an advertisement

docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/installed-docs
	$(BIN)/mkdocs serve $(ARGS)

dist: $(VENV)/installed-release
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

release-check: dist
	$(BIN)/python tests/release_check.py dist $(CONSTRAINTS)

pictures: install
	$(BIN)/python benchmarks/pictures.py

examples: install
	$(BIN)/python benchmarks/example_outputs.py

clean:
	rm -rf $(VENV) runs dist build site
