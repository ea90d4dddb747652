# make demo   a real library built, searched and measured      make test   every test      make lint   style, types, layers
# make docs   the documentation as a site, in docs/_build
# make up     a Prefect server, workers and an object store here, with every flow deployed      make down   stops exactly those
# Each target makes the environment it needs in .venv; PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
TORCH := torch>=2.6,<2.14
BIN := .venv/bin

.PHONY: install demo test lint docs bench up down clean
.DELETE_ON_ERROR:

install: .venv/dev

demo: .venv/demo
	$(BIN)/bookwheel demo

test: .venv/dev
	$(BIN)/pytest -n 2 --dist loadgroup $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A warning is an error.
docs: .venv/dev
	$(BIN)/sphinx-build --quiet --jobs 2 --fail-on-warning --keep-going docs docs/_build

# Those that train and answer want data and a generator, and Flink its jars, named by hand: `--help` says which.
bench: .venv/bench
	set -e; for bench in $(filter-out $(addprefix tests/benchmarks/bench_,dpr.py rag_finetune.py open_book.py flink.py), \
	  $(wildcard tests/benchmarks/bench_*.py)); do echo "== $$bench"; $(BIN)/python $$bench; done

up: .venv/dev
	$(BIN)/python -m flows.machine.local up

down: .venv/dev
	$(BIN)/python -m flows.machine.local down

clean:
	rm -rf .venv bookwheel-demo

.venv/demo: .venv/torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[all]'
	touch $@

.venv/dev: .venv/torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[all,dev]'
	touch $@ .venv/demo

.venv/bench: .venv/dev
	$(BIN)/pip install --quiet --editable '.[all,dev,bench]'
	touch $@

# Without a GPU the CPU build of torch will do: where pip would bring CUDA's libraries (gigabytes), uv knows the CPU builds.
.venv/torch:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	if ! command -v nvidia-smi >/dev/null && \
	  $(BIN)/pip install --dry-run --quiet --report - '$(TORCH)' | grep -q '"name": "\(nvidia\|cuda\)-'; \
	then $(BIN)/pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend=cpu '$(TORCH)'; \
	else $(BIN)/pip install --quiet '$(TORCH)'; fi
	touch $@
