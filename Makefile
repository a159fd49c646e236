# `make demo` and `make test` are all that a fresh machine with Python 3.11 needs.
PYTHON ?= python3.11
PIP = .venv/bin/pip install --disable-pip-version-check -q -c constraints.txt

PORT ?= 9000

.PHONY: demo demo-remote test test-all test-torch lint clean

demo: .venv/demo
	.venv/bin/jaxrl train experiments/laptop_dapo.py --out runs/demo-$(shell date +%Y%m%d-%H%M%S)

# The same, with the sampler in a process of its own: JetStream's server.
demo-remote: .venv/serve
	.venv/bin/jaxrl serve experiments/laptop_dapo.py --port $(PORT) & server=$$!; trap "kill $$server; wait $$server" EXIT; \
	.venv/bin/jaxrl train experiments/laptop_dapo.py --set 'rollout.servers=["127.0.0.1:$(PORT)"]' \
		--out runs/demo-remote-$(shell date +%Y%m%d-%H%M%S)

test: .venv/dev
	.venv/bin/pytest

# All tests, and with the compiler's optimiser on, which `test` leaves off to be quick.
test-all: .venv/dev
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 .venv/bin/pytest -m 'not torch'

# The models of `transformers` beside ours: the only tests that need PyTorch.
test-torch: .venv/torch
	.venv/bin/pytest -m torch tests/parity

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports

.venv/demo: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

# google-jetstream without the dependencies that it names and this project does not use: 2.4 GB of TensorFlow.
.venv/serve: .venv/demo
	$(PIP) shortuuid tiktoken
	$(PIP) --no-deps google-jetstream
	touch $@

.venv/dev: .venv/serve
	$(PIP) -e '.[data,dev]'
	touch $@

.venv/torch: .venv/dev
	$(PIP) torch
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
