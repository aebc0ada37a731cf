# Two commands do all the set-up on a fresh machine: `make serve` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CACHE := $(HOME)/.cache/lorafleet
URL ?= http://127.0.0.1:8000

.PHONY: help install base serve demo test test-services lint audit bench-cpu soak clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lorafleet needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "== Python environment in $(VENV) (some minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@

install: $(VENV)/.installed  ## the Python environment

base: install  ## the example base model, fetched and converted once
	@echo "== Base model in $(CACHE)/base"
	@$(BIN)/python examples/fetch_base.py --cache-dir $(CACHE)/base

serve: base  ## the whole fleet on 127.0.0.1:8000
	@PATH="$(abspath $(BIN)):$$PATH" deploy/serve deploy/quickstart.yaml

demo: install  ## push the example adapters to the running fleet, chat with each, compare perplexities
	@LORAFLEET_URL=$(URL) $(BIN)/python -m examples.demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: base lint  ## everything that needs pip alone
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test-services: install  ## tests against real servers (PostgreSQL, S3); skips, and says so, where one is missing
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[services]'
	$(BIN)/python -m pytest -m services -rs

audit: install  ## known vulnerabilities of the installed packages; 2, and what was not checked, where it cannot tell
	@$(BIN)/python deploy/audit $(VENV)/audit

soak: base  ## long runs
	$(BIN)/python -m pytest -m soak

clean:  ## remove the environment and build outputs; the cache stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
