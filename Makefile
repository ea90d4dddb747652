# make demo       Build a small library from a real dump, search it and measure it.
# make test       Run all tests. `make test-near` runs those of the changed modules.
# make lint       Check style, types and the layers of packages.
# make docs       Build the documentation in docs/_build.
# make up         Start a local Prefect server, workers and an object store, and deploy all flows. `make down` stops them.
# make release    Build the wheel, the source archive and the bill of materials in dist/, and try them in a new environment.
# make lock       Update requirements.lock.
#
# Each target creates the environment that it needs in .venv. PYTHON=python3.12 chooses the interpreter. LOCKED=1 installs the
# versions of requirements.lock instead of the newest that pyproject.toml allows. UV=1 installs with uv in a third of the time;
# uv ignores pip's settings.
PYTHON ?= python3
TORCH := torch>=2.6,<2.14
BIN := .venv/bin
COMMA := ,
# Each process has one thread, because more threads than cores spin while they wait. There are three processes per core of the
# smallest machine, because tests wait for disks, servers and new processes: with two per core, a fifth of the time was idle.
WORKERS ?= 6
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: install demo test test-near test-avx2 compile-tests fuzz lint types style docs bench gpu-day release lock up down clean clean-compiled
.DELETE_ON_ERROR:

install: .venv/dev

demo: .venv/demo
	$(BIN)/bookwheel demo

test: .venv/dev
	$(PYTEST) $(ARGS)

# In a new checkout each worker of `make test` would compile the loops over postings at the same time, which takes half a minute.
# This target runs their tests, and compiles the modules of all tests to bytecode as it collects them.
compile-tests: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -k 'postings and rag_model'

# Run the tests of the modules that changed since a commit (SINCE=main); the layout of tests mirrors that of the packages.
test-near: .venv/dev
	$(PYTEST) $$($(BIN)/python tests/near.py $(SINCE)) $(ARGS)

# Read mutated files of each format. ARGS="10000 passages" tries 10,000 files of one format; `make test` tries a few of each.
fuzz: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.campaign $(ARGS)

# Run with the kernels of a processor that has AVX2 but not AVX512, where encoders compute in float32. These test files compare
# results of torch with another implementation, order or batch size; other tests of models do not depend on the kernels. Two
# processes keep two cores busy, because none of these tests waits.
AVX2_TESTS := $(addprefix encoders/test_,bert cross_encoder embed encoder max_products room sidr_model sparse_encoder static \
    token_encoder trainable) \
  $(addprefix generate/test_,decoder_only decoding_exact decoding_families decoding_peers encoder_decoder likelihood rag) \
  $(addprefix reading/,test_extractive test_labels test_marginal test_prior writers/test_local) \
  $(addprefix training/,loop/test_splitting $(addprefix objectives/test_,losses losses_late losses_lists ra_dit_losses \
    realm_marginal sidr_loss)) \
  serving/following/test_snapshot_slot

test-avx2: WORKERS = 2
test-avx2: .venv/dev
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(AVX2_TESTS:%=tests/rag_model/%.py) $(ARGS)

lint: types style

types: .venv/dev
	$(BIN)/mypy

style: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Warnings are errors. BUILDER=dummy checks all pages without writing them, in half of the time.
BUILDER ?= html
docs: .venv/dev
	$(BIN)/sphinx-build --builder $(BUILDER) --quiet --jobs 2 --fail-on-warning --keep-going docs docs/_build

# Run the benchmarks that need no arguments. The others need data, a generator or Flink's jars; see their `--help`.
bench: .venv/bench
	set -e; for bench in $(filter-out $(addprefix tests/benchmarks/bench_,cited.py dpr.py rag_finetune.py flink.py), \
	  $(wildcard tests/benchmarks/bench_*.py)); do echo "== $$bench"; $(BIN)/python $$bench; done

# Run all benchmarks of a GPU and record them in gpu-day/; the same command resumes them. Without a GPU the inputs are tiny.
# ARGS=--list lists the benchmarks.
gpu-day: .venv/bench
	$(BIN)/python tests/benchmarks/gpu_day.py $(ARGS)

# The wheel is built from the source archive, so a file that the archive lacks is noticed. The demo runs outside of this folder.
release: .venv/dev
	rm -rf dist .venv/release
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv .venv/bill
	.venv/bill/bin/pip install --quiet 'cyclonedx-bom>=7,<8'
	.venv/bill/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file dist/bookwheel.cdx.json \
	  requirements.lock
	$(call environment,.venv/release)
	.venv/release/bin/pip install --quiet "$$(echo dist/*.whl)[all]"
	.venv/release/bin/pip check
	cd .venv/release && bin/bookwheel demo

# ARGS=--upgrade takes newer versions. torch, faiss-gpu and their own requirements are not locked, because their builds depend on
# the machine.
lock: .venv/dev
	$(BIN)/pip install --quiet uv
	printf '%s\n' torch faiss-gpu | $(BIN)/uv pip compile --quiet pyproject.toml --all-extras --universal --generate-hashes --no-annotate \
	  --custom-compile-command 'make lock' --excludes - --output-file requirements.lock $(ARGS)

up: .venv/dev
	$(BIN)/python -m flows.machine.local up

down: .venv/dev
	$(BIN)/python -m flows.machine.local down

# numba caches compiled code by file, so run this after changing a compiled function that another file calls.
clean-compiled:
	find rag_model -name '*.nb[ci]' -delete

clean:
	rm -rf .venv bookwheel-demo

.venv/demo: .venv/torch pyproject.toml
	$(call packages,all)
	touch $@

.venv/dev: .venv/torch pyproject.toml
	$(call packages,all$(COMMA)dev)
	touch $@ .venv/demo

.venv/bench: .venv/dev
	$(call packages,all$(COMMA)dev$(COMMA)bench)
	touch $@

.venv/torch:
	$(call environment,.venv)
	touch $@

install_into = $(if $(UV),$(1)/bin/uv pip install --python $(1)/bin/python,$(1)/bin/pip install) --quiet

# Install this project, editable, with these extras; the lock file holds the requirements of all extras. `editables` is named,
# because an editable install imports it and uv does not install it.
define packages
$(if $(LOCKED),$(call install_into,.venv) --require-hashes --no-deps --requirement requirements.lock)
$(call install_into,.venv) $(if $(LOCKED),--no-deps )--editable '.[$(1)]' editables
endef

# Without a GPU the CPU build of torch suffices. Where pip would download CUDA's libraries (gigabytes), uv finds the CPU build.
define environment
$(PYTHON) -m venv $(1)
$(1)/bin/pip install --quiet --upgrade pip $(if $(UV),uv)
if ! command -v nvidia-smi >/dev/null && \
  $(1)/bin/pip install --dry-run --quiet --report - '$(TORCH)' | grep -q '"name": "\(nvidia\|cuda\)-'; \
then $(1)/bin/pip install --quiet uv && $(1)/bin/uv pip install --quiet --python $(1)/bin/python --torch-backend=cpu '$(TORCH)'; \
else $(call install_into,$(1)) '$(TORCH)'; fi
endef
