# Two commands, each alone, do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
# A GPU user gets a CUDA build by naming it here, e.g. make demo TORCH="torch==2.13.0 --index-url URL".
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Two files at a time, the long ones (e2e, parity) first. A file stays whole, since its tests share servers.
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15

.PHONY: demo test test-fast lint format clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("diffgen needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	@# The page is tested in a browser, where one can be installed.
	command -v chromium || (apt-get update -q && apt-get install -y -q chromium) || echo "no chromium: the page is not tested"
	touch $@

demo: $(VENV)/installed
	$(BIN)/diffgen generate --prompt "a red circle on a blue background" --seed 1
	$(BIN)/diffgen generate --prompt "a white triangle moving right on a purple background" --num-frames 9 --seed 1

test: $(VENV)/installed-dev
	$(PYTEST)

test-fast: $(VENV)/installed-dev
	$(PYTEST) -m "not slow"

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
