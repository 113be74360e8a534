# make demo   environment, bundled pair, the notebooks, a table of what they found
# make test   environment, tests
# make lint   environment, ruff, mypy
# Each can be interrupted and run again. PYTHON=... picks the interpreter, ARGS=... is passed on.

.PHONY: demo test lint environment
.DEFAULT_GOAL := demo

PY := .venv/bin/python

environment:
	@bash .ci/environment

demo: environment
	@$(PY) -m specbench.demo $(ARGS)

test: environment
	@$(PY) -m pytest $(ARGS)

lint: environment
	@$(PY) -m ruff check .
	@$(PY) -m mypy
