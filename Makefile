# What a contributor needs: `make check` and `make test`. What a user needs: `make demo`, `make serve`.
VENV := .venv
# Threads that wait do not spin: tests and their servers share the cores with others.
export OMP_WAIT_POLICY ?= passive
BIN := $(VENV)/bin
PYTHON ?= python3
ARGS ?=

# What `make gpu-check` runs on: the GPU that is there, or "cpu" for toy sizes in an interpreter.
DEVICE ?=

# How long `make soak` runs.
SECONDS ?= 1800

.PHONY: help data demo cluster-demo serve test test-all soak fuzz load gpu-check check format proto clean

help:
	@echo "make demo      install, fetch the default model, start a server, run a guided tour"
	@echo "make serve     keep a server up (ARGS='--port 50100' passes flags on)"
	@echo "make test      the tests, a few minutes      make test-all   the slow ones too"
	@echo "make soak      everything at once for half an hour (SECONDS=120 ARGS='--seed 7')"
	@echo "make fuzz      odd inputs for an hour (ARGS='--minutes 5 --target gguf')"
	@echo "make load      latency against offered rate, beside a peer's server"
	@echo "make cluster-demo  three replicas behind a gateway: where requests go, what they reuse"
	@echo "make gpu-check what only a GPU can show (DEVICE=cpu: toy sizes, interpreted)"
	@echo "make data      fetch the public traces that the simulator replays"
	@echo "make check     format, lint, types, import rule, the proto and what is made from it"
	@echo "make format    apply the format              make proto      stubs and API reference"

# The environment is made anew when the dependencies change.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

$(VENV)/model: $(VENV)/installed
	$(BIN)/prefixcache pull
	touch $@

demo: $(VENV)/model
	$(BIN)/python -m examples.tour

cluster-demo: $(VENV)/model
	$(BIN)/python -m examples.cluster

serve: $(VENV)/model
	$(BIN)/prefixcache serve $(ARGS)

test: $(VENV)/model
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(VENV)/model
	$(BIN)/python -m pytest $(ARGS)

soak: $(VENV)/model
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(ARGS)

fuzz: $(VENV)/model
	$(BIN)/python -m tests.fuzz $(ARGS)

load: $(VENV)/model
	$(BIN)/python -m benchmarks.load --json $(ARGS)

data: $(VENV)/installed
	$(BIN)/python -m benchmarks.traces

gpu-check: $(VENV)/installed
	$(BIN)/python -m benchmarks.gpu_check $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/installed
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
