# make install | demo | test | fuzz | lint: each works alone from a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Two workers of one thread each: the tests are many and small, and threads of two workers would fight over the cores.
WORKERS ?= 2

.PHONY: install demo test fuzz lint

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,wandb,tensorboard,lora,report]"
	touch $@

demo: install
	$(BIN)/treedraft demo

test: install
	PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# The readers of files from strangers, on many more inputs than the tests try.
FUZZ ?= 5000
fuzz: install
	TREEDRAFT_FUZZ=$(FUZZ) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/heads/test_unsafe_files.py

lint: install
	$(BIN)/ruff check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright
