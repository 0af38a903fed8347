# The whole set-up on a machine with Python: each target makes .venv and installs what it needs, once.
PYTHON ?= python3
ARGS ?=
JOBS ?= 2
BIN := .venv/bin
TORCH := torch>=2.11,<2.14

.PHONY: train check test clean

train: .venv/.installed
	$(BIN)/shoal train examples/gpt.py --out runs/gpt $(ARGS)

check: .venv/.installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test: .venv/.installed-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# torch first and alone: where pip finds the builds for this machine, the rest must not choose another one.
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install -e .
	touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/python -m pip install -e '.[test]'
	touch $@

.venv/.installed-check: .venv/.installed-test
	$(BIN)/python -m pip install -e '.[check]'
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
