# Everything happens in .venv (Python) and target/ (Rust); `make clean` removes both.
# Needs Python 3.10 or later, Rust 1.88 or later, a C compiler and make.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Cargo profile of the extension module: quick to compile; `make wheel` uses release.
PROFILE ?= quick
# Passed on to pytest, as in `make test-serve ARGS="-k streaming -x"`.
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
SOURCES := $(shell find native protos -type f -not -path '*/target/*') Cargo.toml Cargo.lock pyproject.toml \
           $(wildcard ray_serve_grpc.data/purelib/*)

# Ray's own notices about usage statistics and accelerators would otherwise open each run.
export RAY_USAGE_STATS_ENABLED := 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO := 0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

.PHONY: help
help: ## Show this list
	@echo "Targets:"
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: $(VENV)/built ## Make .venv and build the extension module into it

.PHONY: demo
demo: $(VENV)/demo ## Run the image pipeline over each transport on a local Ray cluster
	$(call step,examples/image_pipeline.py)
	@$(BIN)/python examples/image_pipeline.py

.PHONY: test
test: ## Build and run every test
	@$(MAKE) --no-print-directory test-unit test-rust test-transport test-serve
	$(call step,all tests passed)

.PHONY: test-unit
test-unit: $(VENV)/test ## Python tests without Ray processes
	$(call step,tests/unit)
	@$(PYTEST) tests/unit $(ARGS)

.PHONY: test-transport
test-transport: $(VENV)/test ## Two endpoints of the extension module, without Ray
	$(call step,tests/transport)
	@$(PYTEST) tests/transport $(ARGS)

.PHONY: test-serve
test-serve: $(VENV)/test ## Ray Serve applications on real local clusters
	$(call step,tests/serve)
	@$(PYTEST) tests/serve --durations=10 $(ARGS)

.PHONY: test-rust
test-rust: ## Tests of the Rust core, without Python
	$(call step,cargo test)
	@cargo test --locked --workspace --no-default-features

.PHONY: bench
bench: $(VENV)/bench ## Measure calls over each transport, with and without Serve, for about ten minutes
	$(call step,bench serve)
	@$(BIN)/python -m bench serve --sizes 1KB,100KB,1MB,10MB --kinds numpy --seconds 0.5 $(ARGS)
	$(call step,bench transport)
	@$(BIN)/python -m bench transport --quick

.PHONY: bench-full
bench-full: $(VENV)/bench ## Measure every size, kind and mode, for about an hour, and write docs/benchmarks.md
	$(call step,bench serve)
	@$(BIN)/python -m bench serve --full --output bench/results/serve.json $(ARGS)
	$(call step,bench transport)
	@$(BIN)/python -m bench transport --full --output bench/results/transport.json
	@$(MAKE) --no-print-directory bench-report

.PHONY: bench-two-hosts
bench-two-hosts: $(VENV)/bench ## As root: measure between two network namespaces, for about ten minutes
	$(call step,bench two-hosts)
	@$(BIN)/python -m bench two-hosts --output bench/results/two-hosts.json $(ARGS)

.PHONY: bench-report
bench-report: $(VENV)/bench ## Draw the charts and write docs/benchmarks.md of bench/results
	$(call step,docs/benchmarks.md)
	@$(BIN)/python -m bench plot
	@$(BIN)/python -m bench report

.PHONY: lint
lint: $(VENV)/dev ## ruff, mypy, cargo fmt and clippy
	$(call step,lint)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@cargo fmt --all --check
	@PYO3_PYTHON=$(CURDIR)/$(BIN)/python cargo clippy --locked --workspace --all-targets -- -D warnings
	@cargo clippy --locked --workspace --no-default-features --all-targets -- -D warnings

.PHONY: format
format: $(VENV)/dev ## Format the Python and Rust sources
	@$(BIN)/ruff check --fix --select I .
	@$(BIN)/ruff format .
	@cargo fmt --all

.PHONY: generated
generated: $(VENV)/built ## Write the generated documents anew
	@$(BIN)/python -m ray_serve_grpc.config > docs/configuration.md

.PHONY: docs-check
docs-check: $(VENV)/built ## Check that the generated documents are up to date
	$(call step,generated documents)
	@$(BIN)/python -m ray_serve_grpc.config | diff -u docs/configuration.md - || \
		{ echo "docs/configuration.md is out of date: run 'make generated'"; exit 1; }

.PHONY: wheel
wheel: $(VENV)/maturin ## Build a release wheel and a source archive into dist/
	$(call step,wheel and sdist)
	@$(BIN)/maturin build --release --locked --sdist --out dist

.PHONY: clean
clean: ## Remove .venv, target, dist and caches
	rm -rf $(VENV) target dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f ray_serve_grpc/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each file says that a step was done, and is as old as the step.

$(VENV)/bin/python:
	$(call step,virtual environment in $(VENV))
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --upgrade pip

$(VENV)/maturin: pyproject.toml | $(VENV)/bin/python
	$(call step,maturin)
	@$(PIP) install --quiet 'maturin>=1.13.2,<2'
	@touch $@

$(VENV)/built: $(SOURCES) | $(VENV)/maturin
	$(call step,extension module (cargo profile $(PROFILE)) and the dependencies of ray_serve_grpc)
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --locked --profile $(PROFILE)
	@touch $@

# Figures are of a release build. Whatever was built after it, or from other sources, calls for another one.
$(VENV)/release: $(SOURCES) $(wildcard $(VENV)/built) | $(VENV)/maturin
	$(call step,extension module (cargo profile release) and the dependencies of ray_serve_grpc)
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --locked --release
	@touch $(VENV)/built
	@touch $@

# The package is installed by now: pip only adds what its extras ask for.
$(VENV)/bench: $(VENV)/release
$(VENV)/demo $(VENV)/test $(VENV)/dev: $(VENV)/built
$(VENV)/demo $(VENV)/test $(VENV)/dev $(VENV)/bench: $(VENV)/%: pyproject.toml
	$(call step,dependencies for: $*)
	@$(PIP) install --quiet --progress-bar off 'ray_serve_grpc[$*]'
	@touch $@

define step
@printf '\n==> %s\n' "$(1)"
endef
