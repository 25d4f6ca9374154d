# What one does with a checkout. Everything runs in the active virtual environment, or in .venv,
# which is made where none is active.
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
STAMP := $(VENV)/.hpctrain-dev-installed
export PATH := $(abspath $(BIN)):$(PATH)
TESTS ?=
PYTEST ?= pytest -q
# see tests/conftest.py
BY_FILE := --dist loadfile --no-loadscope-reorder
BESIDE := -n 2 $(BY_FILE)

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

.PHONY: install
install: $(STAMP) ## make .venv where no virtual environment is active, and install hpctrain with its tools

define virtual_environment
if [ ! -x "$(BIN)/python" ]; then \
  echo "making $(VENV)"; \
  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
    { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.11 (or newer)" >&2; exit 3; }; \
  $(PYTHON) -m venv "$(VENV)" || \
    { rm -rf "$(VENV)"; echo "no venv module: as root, apt-get install python3-venv" >&2; exit 3; }; \
fi
endef
PIP := "$(BIN)/python" -m pip install --disable-pip-version-check -c constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(virtual_environment)
	@echo "installing hpctrain and its tools into $(VENV)"
	@$(PIP) -qq -e ".[dev]"
	@touch "$@" "$(PLAIN)"

# What a user has: without the tests' tools, which are most of what there is to install.
PLAIN := $(VENV)/.hpctrain-installed
$(PLAIN): pyproject.toml constraints.txt
	@$(virtual_environment)
	@echo "installing hpctrain into $(VENV): torch takes most of the time"
	@$(PIP) -e .
	@touch "$@"

.PHONY: demo
demo: $(if $(wildcard $(STAMP)),,$(PLAIN)) ## the whole story on this machine, without SLURM: train, be preempted, come back smaller
	@python demo/demo.py

# What tests need beside Python's packages, and without them. One at a time: apt has one lock.
SURROUNDINGS := slurm browser fuse container strace
.PHONY: surroundings $(SURROUNDINGS)
surroundings: $(SURROUNDINGS)
$(SURROUNDINGS):
	@PYTHON=$(PYTHON) flock .surroundings.lock tests/support/install_$@.sh >.$@-install.log 2>&1 || \
	  { tail -n 1 .$@-install.log >&2; \
	    [ -z "$(HPCTRAIN_REQUIRE)" ] && echo "tests that need it are skipped" >&2; }
	@rm -f .$@-install.log

# Each process of a test would compile hpctrain anew, where Python writes no caches.
.PHONY: compiled
compiled: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= python -m compileall -q -j 0 hpctrain tests/support
	@PYTHONDONTWRITEBYTECODE= python -m tests.support.compile_tests

.PHONY: test
test: compiled ## ten minutes of tests, without root, SLURM, browser, FUSE or containers; TESTS=tests/unit for some of them
	@PYTHONDONTWRITEBYTECODE= $(PYTEST) --tier test $(BESIDE) $(TESTS)

.PHONY: landing-tests
landing-tests: compiled surroundings
	@PYTHONDONTWRITEBYTECODE= $(PYTEST) --tier check --second-run -n 5 $(BY_FILE) $(TESTS)

.PHONY: slurm-systems
slurm-systems: $(STAMP)
	@for version in $(SLURM_VERSIONS); do \
	  PYTHON=python tests/support/slurm_system.sh prepare $$version || \
	    { [[ "$(HPCTRAIN_REQUIRE)" != *slurm* ]] || exit 3; echo "its tests are left out" >&2; }; \
	done

# The versions of SLURM beside this machine's own, and which tests each is held against.
SLURM_VERSIONS := 24.11 26.05
SYSTEM := tests/support/slurm_system.sh

# $(1): what pytest is told. The versions run beside each other, since tests wait for SLURM mostly; what
# each has printed comes in their order at the end.
define on_the_other_versions
said=$$(mktemp -d); trap 'rm -rf "$$said"' EXIT; \
for version in $(SLURM_VERSIONS); do \
  PYTHON=python $(SYSTEM) prepare $$version || \
    { [[ "$(HPCTRAIN_REQUIRE)" != *slurm* ]] || exit 3; echo "its tests are left out" >&2; continue; }; \
  echo "SLURM $$version: follow it in $$said/$$version" >&2; \
  { PYTHON=python HPCTRAIN_REQUIRE=slurm $(SYSTEM) run $$version $(PYTEST) $(BESIDE) $(1) \
      >"$$said/$$version" 2>&1 || touch "$$said/failed"; } & \
done; wait; \
for version in $(SLURM_VERSIONS); do \
  [[ ! -e "$$said/$$version" ]] || { echo "# SLURM $$version"; cat "$$said/$$version"; }; \
done; [[ ! -e "$$said/failed" ]]
endef

.PHONY: slurm-versions
slurm-versions: $(STAMP) ## what SLURM does to a run, on the other versions of SLURM as well
	@$(call on_the_other_versions,--tier check --second-run -m every_slurm tests/slurm tests/stories)

.PHONY: lint
lint: $(STAMP) ## format, style, types, direction of imports, shell scripts, spelling
	@ruff format --check --quiet . || { echo "run: ruff format ." >&2; exit 1; }
	@ruff check --quiet .
	@mypy --no-error-summary
	@lint-imports --no-logo >.lint-imports.log || { cat .lint-imports.log; exit 1; }
	@rm -f .lint-imports.log
	@shellcheck -x .ci/run sbatch/body.sh sbatch/stage.sh sbatch/stage_node.sh sbatch/preflight.sh sbatch/train.sbatch tests/support/check_tests.sh tests/support/install_slurm.sh tests/support/install_browser.sh tests/support/slurm_system.sh tests/support/install_fuse.sh tests/support/install_container.sh tests/support/install_strace.sh tests/support/torch_environment.sh tests/support/framework_environment.sh
	@python -m tests.support.lint_tests
	@codespell hpctrain tests docs demo examples sbatch site-configs README.md CHANGELOG.md
	@echo "lint: clean"

# A warning fails it: a link that leads nowhere, a page in no list, a type without an entry.
.PHONY: docs
docs: $(STAMP) ## the pages of docs/ and the API as a site, in build/docs
	@python -m sphinx -q -E -W --keep-going -d build/doctrees docs build/docs
	@echo "docs: build/docs/index.html"

.PHONY: lint-and-docs
lint-and-docs: lint docs

# Debian's packages are fetched while Python's are, and while lint and docs compute.
.PHONY: check
check: ## lint, docs, all tests but long campaigns: what continuous integration runs
	@$(MAKE) -j3 lint-and-docs surroundings
	@tests/support/check_tests.sh

.PHONY: soak
soak: compiled surroundings ## all tests, all of tests/slurm on every version of SLURM, long campaigns: for a night
	@$(PYTEST) --tier soak -n 3 $(BY_FILE) $(TESTS)
	@$(call on_the_other_versions,--tier soak tests/slurm tests/stories)
	@$(PYTEST) --tier soak -m soak --timeout=0 $(TESTS)
	@$(call on_the_other_versions,--tier soak -m soak --timeout=0 -n 0 tests/slurm/test_disturbances.py)

TORCH_VERSIONS ?= 2.8.0 2.14.1
TORCH_FOLDER ?= /var/cache/hpctrain-torch
TORCH_TESTS ?= tests/engines tests/e2e

.PHONY: torch-versions
torch-versions: $(STAMP) ## engines and whole stories on the oldest and the newest torch; 7 GB each, one at a time
	@for version in $(TORCH_VERSIONS); do \
	  other=$$(tests/support/torch_environment.sh $$version $(TORCH_FOLDER)) || exit 1; \
	  echo "# torch $$version"; \
	  "$$other" -m pytest -q -p no:cacheprovider $(BESIDE) $(TORCH_TESTS) || exit 1; \
	  rm -rf "$(TORCH_FOLDER)/$$version"; \
	done

# Where the wheels are that a machine without a package index installs from.
GPU_WHEELS ?= build/gpu-wheels
ONLY ?=
# Of the machine that has the GPU, not of this one. pip takes no platform as older than it is named.
GPU_PLATFORM := --only-binary=:all: --implementation cp --python-version 3.12 \
  $(foreach glibc,2_28 2_27 2_24 2_17 2014 1,--platform manylinux$(if $(findstring _,$(glibc)),_)$(glibc)_x86_64)
# What such a machine may lack, with what these need.
GPU_PACKAGES := submitit plotly xxhash cloudpickle filelock pydantic hjson

.PHONY: gpu
gpu: ## prove hpctrain on this machine's GPU, in 8 minutes: results in $$OUT or build/gpu; ONLY=part
	@$(PYTHON) -m tests.gpu --wheels "$(GPU_WHEELS)" $(ONLY:%=--only %)

.PHONY: gpu-dry
gpu-dry: $(STAMP) ## rehearse that on the CPU
	@python -m tests.gpu --dry --together $(ONLY:%=--only %)

.PHONY: gpu-wheels
gpu-wheels: $(STAMP) ## fetch what a machine with a GPU and no package index may lack
	@rm -rf "$(GPU_WHEELS)"
	@python -m pip download -qq --disable-pip-version-check $(GPU_PLATFORM) -c constraints.txt \
	  -d "$(GPU_WHEELS)" $(GPU_PACKAGES)
	@DS_BUILD_OPS=0 python -m pip wheel -qq --disable-pip-version-check -c constraints.txt \
	  -w "$(GPU_WHEELS)" --no-deps deepspeed . || echo "zero1 to zero3 will not run there" >&2
	@du -sh "$(GPU_WHEELS)"

.PHONY: bench
bench: $(STAMP) ## measure speed; prints ratios
	@for program in benchmarks/[a-z]*.py; do echo "# $$program"; python "$$program" || exit 1; done

.PHONY: scale
scale: $(STAMP) ## what hpctrain adds at 64 to 16,384 ranks: laws, and real points
	@python -m benchmarks.scale

.PHONY: cluster
cluster: slurm ## a SLURM of four nodes on this machine, to try things on; Ctrl-C ends it
	@python -m tests.support.slurm_cluster up

.PHONY: settings
settings: $(STAMP) ## write docs/settings.md, the events of docs/development/ledger.md, the rules of docs/check.md and the pages on site presets anew
	@python docs/generate_settings.py
	@python docs/generate_ledger.py
	@python docs/generate_lint.py
	@python docs/generate_site_reference.py
	@python docs/generate_sites.py

.PHONY: pictures
pictures: $(STAMP) ## draw the pictures of the documents anew; the report's needs a browser (make browser)
	@python -m docs.generate_pictures

.PHONY: clean
clean: ## remove what building and testing left behind
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
