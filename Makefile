PYTHON ?= python3
JOBS ?= 2
ARGS ?=
BIN := .venv/bin

.PHONY: train test check

train: .venv/.installed  ## the quickstart; overrides: make train ARGS="--train.steps 50"
	$(BIN)/python train.py quickstart $(ARGS)

test: .venv/.installed  ## all tests; a part of them: make test ARGS="-m 'not slow' tests/test_config.py"
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

check: .venv/.installed  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamp comes last, so that an interrupted installation is repeated.
.venv/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, $(PYTHON) is %d.%d: set PYTHON=python3.11 or newer" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.txt
	@touch $@
