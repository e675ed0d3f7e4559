# Everything here needs only make, a POSIX shell and Python 3.11 or newer.
# The environment lives in .venv; a stamp per kind of environment says when it was last brought up to date.

.POSIX:
.SUFFIXES:

PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
ARGS =

# -c constraints.txt in every install: torch and the tools come at the versions that were tested.
# Quiet twice: errors still show, and a machine with unusual package sources does not fill the screen with warnings.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
SOURCES_OF_TRUTH = pyproject.toml constraints.txt

help:
	@echo "make run     train the built-in example job (installs what running needs, nothing more)"
	@echo "make test    run the tests; ARGS='-k name' picks some"
	@echo "make coverage  the tests, and which lines they do not reach"
	@echo "make lint    ruff: style, import order and formatting"
	@echo "make types   mypy --strict over src and hooks as users write them, pyright over the code in the docs"
	@echo "make bench   microseconds per step against other trainers; ARGS='overhead --quick'"
	@echo "make soak    the tests that take minutes"
	@echo "make matrix  some tests with other versions of Python, torch and the libraries; ARGS='python-3.13' picks a row"
	@echo "make properties  the property tests, each time on new examples"
	@echo "make docs    regenerate the public stub and the pages that are made from code and test outcomes"
	@echo "make site    build the documentation into build/site; open build/site/index.html"
	@echo "make clean   remove .venv, caches and build outputs (never runs/)"

run: $(VENV)/.run-stamp
	$(BIN)/hookline train $(ARGS)

test: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest -n 2 $(ARGS)

coverage: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest -n 2 --cov=hookline --cov-report=term:skip-covered $(ARGS)

soak: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest -m soak $(ARGS)

matrix: $(VENV)/bin/python
	$(BIN)/python tools/matrix.py $(ARGS)

properties: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile=new $(ARGS)

lint: $(VENV)/.dev-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-stamp
	$(BIN)/mypy
	$(BIN)/python tools/docs_code.py
	$(BIN)/basedpyright --project build/docs_code --pythonpath $(BIN)/python

bench: $(VENV)/.bench-stamp
	$(BIN)/python -m bench $(ARGS)

docs: $(VENV)/.dev-stamp
	$(BIN)/python tools/public_stub.py
	$(BIN)/python tools/events_page.py
	$(BIN)/python tools/reference_pages.py
	$(BIN)/python tools/api_page.py
	$(BIN)/python tools/architecture_page.py
	$(BIN)/python tools/decisions_page.py
	$(BIN)/python tools/benchmarks_page.py
	$(BIN)/python tools/compatibility_page.py
	$(BIN)/python tools/requirements_page.py

site: $(VENV)/.site-stamp
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage conformance.json
	find src tests bench tools -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Hookline needs Python 3.11 or newer; set PYTHON=, e.g. make run PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run-stamp: $(VENV)/bin/python $(SOURCES_OF_TRUTH)
	@echo "Installing Hookline into $(VENV) (about a minute) ..."
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.run-stamp
	@echo "Installing the test tools into $(VENV) (about a minute) ..."
	@$(PIP_INSTALL) pip
	@$(PIP_INSTALL) -e . --group dev
	@touch $@

$(VENV)/.bench-stamp: $(VENV)/.run-stamp
	@echo "Installing the trainers to compare with into $(VENV) (about a minute) ..."
	@$(PIP_INSTALL) pip
	@$(PIP_INSTALL) -e . --group bench
	@touch $@

$(VENV)/.site-stamp: $(VENV)/.run-stamp
	@$(PIP_INSTALL) pip
	@$(PIP_INSTALL) --group site
	@touch $@

.PHONY: help run test coverage soak matrix properties lint types bench docs site clean
