# Two commands: `make quickstart` (prompts -> a drafter that decodes) and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup quickstart test lint docs clean

setup: $(VENV)/installed

$(VENV)/installed: requirements.txt requirements-test.txt requirements-nodeps.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements-test.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-nodeps.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

quickstart: setup
	$(BIN)/python -m dflash_lightning.quickstart

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 15

docs: setup
	$(BIN)/python docs/make_reference.py

clean:
	rm -rf $(VENV) runs
