# make demo   environment, bundled pair, the notebooks, a table of what they found
# make test   environment, tests (two files at a time; ARGS=-n0 one)
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
	@$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

lint: environment
	@$(PY) -m ruff check .
	@$(PY) -m mypy
