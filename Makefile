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

SHELL := /bin/bash
HOST := $(shell rustc -vV | sed -n 's/^host: //p')

# Ray's own notices about usage statistics and accelerators would otherwise open each run.
export RAY_USAGE_STATS_ENABLED := 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO := 0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

.PHONY: help
help: ## Show this list
	@echo "Targets:"
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: $(VENV)/built ## Make .venv and build the extension module into it

.PHONY: demo
demo: $(VENV)/demo ## Run the image pipeline over each transport on a local Ray cluster
	$(call step,examples/image_pipeline.py)
	@$(BIN)/python examples/image_pipeline.py

.PHONY: test
test: ## Build and run every test but those of faults, which want a quiet machine
	@$(MAKE) --no-print-directory test-unit test-rust test-transport test-serve test-docs
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

.PHONY: test-faults
test-faults: $(VENV)/test ## Faults under load, each request accounted for (10 minutes); longer with FAULT_SECONDS=60 FAULT_CALLS=10000
	$(call step,tests/faults)
	@$(PYTEST) tests/faults --durations=10 $(ARGS)

# How often the transport tests run, each time with other intervals between switches of threads.
REPEAT ?= 50

.PHONY: test-repeat
test-repeat: $(VENV)/test ## The transport tests again and again, under random thread switching, as in REPEAT=10
	$(call step,tests/transport $(REPEAT) times)
	@for round in $$(seq $(REPEAT)); do \
		printf 'round %s: ' $$round; \
		SWITCH_SEED=$$round $(PYTEST) tests/transport -q -x --no-header -p no:cacheprovider $(ARGS) | tail -n 1; \
		test $${PIPESTATUS[0]} -eq 0 || exit 1; \
	done

SOAK_SECONDS ?= 1800

.PHONY: soak
soak: $(VENV)/bench $(VENV)/test ## Mixed load with random faults for half an hour, drawn to soak/; other lengths by SOAK_SECONDS
	$(call step,soak for $(SOAK_SECONDS) s)
	@PYTHONPATH=tests/serve:tests/faults $(BIN)/python tests/faults/soak.py $(SOAK_SECONDS) soak

.PHONY: test-docs
test-docs: $(VENV)/test $(VENV)/demo ## The examples, and every code block of the documentation
	$(call step,tests/docs)
	@$(PYTEST) tests/docs --durations=10 $(ARGS)

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

.PHONY: test-ray-versions
test-ray-versions: $(VENV)/maturin ## Transport and some Serve tests on other versions of Ray, as in VERSIONS="2.55.1"
	$(call step,wheel (cargo profile $(PROFILE)))
	@rm -rf dist/versions && $(BIN)/maturin build --locked --profile $(PROFILE) --out dist/versions
	@$(BIN)/python tests/ray_versions.py --wheel dist/versions/*.whl $(VERSIONS)

# Seconds for each target. The sanitizer's flags are unstable, hence the bootstrap; cargo-fuzz is not needed, but works.
FUZZ_SECONDS ?= 10
FUZZ_TARGETS := frames messages metadata certificates descriptors
FUZZ_FLAGS := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
              -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
              -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address

.PHONY: fuzz
fuzz: ## Fuzz what parses the network's bytes, as in FUZZ_SECONDS=600
	@cd fuzz && RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(FUZZ_FLAGS)" cargo build --locked --release --target $(HOST)
	@for target in $(FUZZ_TARGETS); do \
		printf '\n==> fuzz %s for %s s\n' $$target $(FUZZ_SECONDS); \
		mkdir -p fuzz/found/$$target; \
		fuzz/target/$(HOST)/release/$$target fuzz/found/$$target fuzz/corpus/$$target -max_total_time=$(FUZZ_SECONDS) \
			-max_len=40000 -rss_limit_mb=2048 -timeout=10 -artifact_prefix=fuzz/found/ -print_final_stats=1 \
			-verbosity=0 2>&1 | grep -E "ERROR|SUMMARY|panicked|stat::(number|peak)|assert" ; \
		test $${PIPESTATUS[0]} -eq 0 || exit 1; \
	done

.PHONY: test-asan
test-asan: ## The Rust tests and the fuzz corpus under AddressSanitizer, which watches the unsafe code
	$(call step,cargo test under AddressSanitizer)
	@ASAN_OPTIONS=allocator_may_return_null=1 RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address \
		cargo test --locked --no-default-features --lib --test fuzz_corpus \
		--target $(HOST) --target-dir target/asan

.PHONY: audit
audit: $(VENV)/test ## Known vulnerabilities and licences of every dependency (needs cargo-deny and the network)
	$(call step,cargo deny)
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	@cargo deny --all-features check
	$(call step,pip-audit)
	@$(PIP) install --quiet pip-audit
	@$(BIN)/pip-audit --skip-editable --progress-spinner off

.PHONY: lint
lint: $(VENV)/dev $(VENV)/test ## ruff, mypy, cargo fmt and clippy
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

.PHONY: docs
docs: $(VENV)/docs ## Build the documentation into target/site, and check the links within it
	$(call step,target/site)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

.PHONY: docs-links
docs-links: $(VENV)/docs ## Check the links of the documentation to other sites (needs the network)
	$(call step,links to other sites)
	@$(BIN)/python docs/.site/external_links.py

# The limited API starts at 3.11 here; Python 3.10 gets a wheel of its own, as in INTERPRETERS="python3.10 python3.11".
INTERPRETERS ?= $(BIN)/python

.PHONY: wheel
wheel: $(VENV)/zig ## Remove dist/, and build release wheels for glibc 2.17 and later and a source archive into it
	$(call step,wheel and sdist)
	@rm -rf dist
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/maturin build --release --locked --zig --compatibility manylinux2014 \
		--sdist --out dist --interpreter $(INTERPRETERS)

.PHONY: test-wheel
test-wheel: $(VENV)/bin/python ## Install the wheel of dist/ into a fresh environment without Rust, and run Serve there
	$(call step,wheel in a fresh environment)
	@ls dist/*.whl >/dev/null 2>&1 || $(MAKE) --no-print-directory wheel
	@$(BIN)/python tests/wheel.py $(ARGS) dist/*-abi3-*.whl

.PHONY: test-sdist
test-sdist: $(VENV)/bin/python ## Build a wheel from the source archive of dist/, and try it in the same way
	$(call step,source archive in a fresh environment)
	@ls dist/*.tar.gz >/dev/null 2>&1 || $(MAKE) --no-print-directory wheel
	@$(BIN)/python tests/wheel.py --sdist $(ARGS) dist/*.tar.gz

.PHONY: clean
clean: ## Remove .venv, target, dist and caches
	rm -rf $(VENV) .venv-ray target fuzz/target fuzz/found dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
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

# Its linker makes an extension module for an older glibc than this machine's.
$(VENV)/zig: pyproject.toml | $(VENV)/maturin
	@$(PIP) install --quiet 'maturin[zig]>=1.13.2,<2'
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
$(VENV)/demo $(VENV)/test $(VENV)/dev $(VENV)/docs: $(VENV)/built
$(VENV)/demo $(VENV)/test $(VENV)/dev $(VENV)/docs $(VENV)/bench: $(VENV)/%: pyproject.toml
	$(call step,dependencies for: $*)
	@$(PIP) install --quiet --progress-bar off 'ray_serve_grpc[$*]'
	@touch $@

define step
@printf '\n==> %s\n' "$(1)"
endef
