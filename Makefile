# Every target first installs what it needs into .venv, once. The machine needs make and Python 3.11 or newer.

PYTHON ?= python3
# Options for the commands: make test PYTEST_ARGS="-k tied -x", make demo DEMO_ARGS="--workers 6",
# make bench BENCH_ARGS="--size small --work 'big-*' --report out.html",
# make bench-cluster BENCH_CLUSTER_ARGS="--work 'fan-out*' --repeats 9".
PYTEST_ARGS ?=
# For test-torch: make test-torch TORCH=2.15.0
TORCH ?= 2.13.0
# For test-torchft: make test-torchft TORCHFT=torchft-nightly
TORCHFT ?= torchft==0.2.0
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_CLUSTER_ARGS ?=
SEEDS ?= 10000
FIRST_SEED ?= 0
FUZZ_MUTATIONS ?= 100000

VENV := .venv
TORCH_VENV := .venv-torch-$(TORCH)
BIN := $(VENV)/bin
READY := $(VENV)/.torchferry-ready
CONFORMANCE := ../shared/conformance/test_pg_transport.py

.DEFAULT_GOAL := help
.PHONY: help demo bench bench-docs bench-cluster test test-all test-torch test-torchft faults simulate fuzz check format conformance wheel \
  clean distclean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

demo: $(READY) ## four workers train, one is killed, and a replacement gets its state from a peer
	@$(BIN)/python examples/replace_worker.py $(DEMO_ARGS)

bench: $(READY) ## compare with other ways to move a state; BENCH_ARGS="--size small"
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-docs: $(READY) ## run both benchmarks in full and write docs/benchmarks.md with plots; needs root
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  $(BIN)/python -m benchmarks $(BENCH_ARGS) --json "$$folder/bench.json" && \
	  $(BIN)/python -m benchmarks cluster $(BENCH_CLUSTER_ARGS) --json "$$folder/cluster.json" && \
	  $(BIN)/python -m benchmarks --from "$$folder/bench.json" --from "$$folder/cluster.json" \
	    --markdown docs/benchmarks.md

bench-cluster: $(READY) ## measure several receivers and sources on seven hosts (network namespaces) with 1 Gbit/s links; needs root
	@$(BIN)/python -m benchmarks cluster $(BENCH_CLUSTER_ARGS)

test: $(READY) ## run the quick tests, in about three minutes
	@TEST_SET=quick $(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: $(READY) ## run all tests but those of `make faults`
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-torch: ## run all tests with another version of torch, in a venv of its own; TORCH=2.15.0
	@sh scripts/set_up_venv.sh "$(PYTHON)" $(TORCH_VENV) "$(TORCH)"
	@$(TORCH_VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-torchft: ## run torchft's own tests with torchferry's transports, in a venv of its own; TORCHFT=torchft-nightly
	@sh scripts/test_torchft.sh "$(PYTHON)" "$(TORCHFT)" "$(TORCH)"

faults: $(READY) ## run every fault in docs/faults.md, with real processes
	@FAULTS=all $(BIN)/python -m pytest tests/faults tests/sync tests/benchmarks/test_cluster_command.py $(PYTEST_ARGS)

simulate: $(READY) ## run the protocol in a simulated network; SEEDS=100000, FIRST_SEED=0
	@SEEDS=$(SEEDS) FIRST_SEED=$(FIRST_SEED) $(BIN)/python -m pytest -s tests/simulation $(PYTEST_ARGS)

fuzz: $(READY) ## decode damaged metadata, and answer and read damaged messages; FUZZ_MUTATIONS=100000
	@FUZZ_MUTATIONS=$(FUZZ_MUTATIONS) $(BIN)/python -m pytest -s tests/hostile -k mutat $(PYTEST_ARGS)

check: $(READY) ## check formatting, lint, types, and the rules of the architecture
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/architecture

format: $(READY) ## fix formatting and import order
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

# -B and no:cacheprovider: do not write into the suite's folder, which may be read-only.
conformance: $(READY) ## run the contract tests of PGTransport, if their folder is beside this checkout
	@test -f $(CONFORMANCE) || { \
	  echo "$(CONFORMANCE) does not exist: the contract tests are not part of this repository."; exit 1; }
	@$(BIN)/python -B -m pytest -p no:cacheprovider $(CONFORMANCE)

wheel: $(READY) ## build the wheel into dist/
	@$(BIN)/python -m build --wheel

clean: ## remove the files that builds and tests leave
	@rm -rf build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find src tests benchmarks examples scripts -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove .venv and the venvs of test-torch and test-torchft as well
	@rm -rf $(VENV) .venv-torch-* .venv-torchft-*

$(READY): pyproject.toml Makefile scripts/set_up_venv.sh
	@sh scripts/set_up_venv.sh "$(PYTHON)" $(VENV)
	@touch $@
