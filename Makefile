# make demo   a real library built, searched and measured      make test   every test (test-near: of what changed)      make lint   style, types, layers
# make docs   the documentation as a site, in docs/_build
# make up     a Prefect server, workers and an object store here, with every flow deployed      make down   stops exactly those
# make release   wheel, source and bill of materials in dist/, tried in a bare environment      make lock   renew requirements.lock
# Each target makes the environment it needs in .venv; PYTHON=python3.12 chooses the interpreter, LOCKED=1 the versions of
# requirements.lock instead of the newest that pyproject.toml allows. UV=1 installs with uv, which takes a third of the time
# but reads no settings of pip.
PYTHON ?= python3
TORCH := torch>=2.6,<2.14
BIN := .venv/bin
COMMA := ,
# Processes of one thread each: threads that wait for a core that another process has do nothing but spin. Three times as many
# as the smallest machine has cores, because tests wait: for a disk, a server, a process that starts. With four, a fifth of two
# cores' time was idle.
WORKERS ?= 6
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: install demo test test-near test-avx2 compile-tests fuzz lint types style docs bench gpu-day release lock up down clean clean-compiled
.DELETE_ON_ERROR:

install: .venv/dev

demo: .venv/demo
	$(BIN)/bookwheel demo

test: .venv/dev
	$(PYTEST) $(ARGS)

# On a new checkout each worker of `make test` would compile the loops over postings to machine code at the same time, which takes
# half a minute. All tests are collected, which compiles what they import to bytecode, and those of postings run.
compile-tests: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -k 'postings and rag_model'

# Near what changed since a commit (SINCE=main), by the mirrored layout of the tests.
test-near: .venv/dev
	$(PYTEST) $$($(BIN)/python tests/near.py $(SINCE)) $(ARGS)

# Mutated files of every kind that is read: ARGS="10000 passages" tries 10,000 of one kind. `make test` tries a few of each.
fuzz: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.campaign $(ARGS)

# As a processor with AVX2 alone computes: with other kernels, and its encoders in float32. These files compare what torch
# computes with another implementation, order or batch; everything else about models does not depend on the kernels. As
# nothing waits in them, two processes keep two cores busy.
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

# A warning is an error. BUILDER=dummy checks all pages and writes none, which takes half of the time.
BUILDER ?= html
docs: .venv/dev
	$(BIN)/sphinx-build --builder $(BUILDER) --quiet --jobs 2 --fail-on-warning --keep-going docs docs/_build

# Those that train and answer want data and a generator, and Flink its jars, named by hand: `--help` says which.
bench: .venv/bench
	set -e; for bench in $(filter-out $(addprefix tests/benchmarks/bench_,cited.py dpr.py rag_finetune.py flink.py), \
	  $(wildcard tests/benchmarks/bench_*.py)); do echo "== $$bench"; $(BIN)/python $$bench; done

# Every benchmark of a GPU, recorded in gpu-day/ and resumed by the same command; on tiny sizes without a GPU. ARGS="--list".
gpu-day: .venv/bench
	$(BIN)/python tests/benchmarks/gpu_day.py $(ARGS)

# The wheel is built of the source archive, so that one must be whole. The demo runs outside of this folder.
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

# ARGS=--upgrade takes newer versions. torch, faiss-gpu and what they alone want stay out: the machine decides between builds.
lock: .venv/dev
	$(BIN)/pip install --quiet uv
	printf '%s\n' torch faiss-gpu | $(BIN)/uv pip compile --quiet pyproject.toml --all-extras --universal --generate-hashes --no-annotate \
	  --custom-compile-command 'make lock' --excludes - --output-file requirements.lock $(ARGS)

up: .venv/dev
	$(BIN)/python -m flows.machine.local up

down: .venv/dev
	$(BIN)/python -m flows.machine.local down

# numba keeps compiled code by file: needed after a change of a function that another file calls.
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

# Install this project, editable, with these extras; the lock holds what all extras want.
define packages
$(if $(LOCKED),$(call install_into,.venv) --require-hashes --no-deps --requirement requirements.lock)
$(call install_into,.venv) $(if $(LOCKED),--no-deps )--editable '.[$(1)]'
endef

# Without a GPU the CPU build of torch will do: where pip would bring CUDA's libraries (gigabytes), uv knows the CPU builds.
define environment
$(PYTHON) -m venv $(1)
$(1)/bin/pip install --quiet --upgrade pip $(if $(UV),uv)
if ! command -v nvidia-smi >/dev/null && \
  $(1)/bin/pip install --dry-run --quiet --report - '$(TORCH)' | grep -q '"name": "\(nvidia\|cuda\)-'; \
then $(1)/bin/pip install --quiet uv && $(1)/bin/uv pip install --quiet --python $(1)/bin/python --torch-backend=cpu '$(TORCH)'; \
else $(call install_into,$(1)) '$(TORCH)'; fi
endef
