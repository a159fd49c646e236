# `make demo` and `make test` are all that a fresh machine with Python 3.11 needs.
PYTHON ?= python3.11
PIP = .venv/bin/pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: demo test test-all lint clean

demo: .venv/demo
	.venv/bin/jaxrl train experiments/laptop_dapo.py --out runs/demo-$(shell date +%Y%m%d-%H%M%S)

test: .venv/dev
	.venv/bin/pytest

test-all: .venv/dev
	.venv/bin/pytest -m ''

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/demo: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/dev: .venv/demo
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
