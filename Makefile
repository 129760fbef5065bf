# make demo [FULL=1] [BATCH=256] [CUDA=1]   the tour (examples/demo.py), in an environment of its own
# make test [ARGS="-k name"]                lint, and the tests on each supported Python found here
# make lint                                 ruff, mypy and clang-format alone
# make format                               rewrites the sources as ruff and clang-format want them
# make bench [ARGS=...] [CUDA=1]            the benchmarks
# make sanitize                             csrc under the address and thread sanitizers
# make wheel                                source distribution and wheel, proved without a compiler
# make bazel                                the native part under Bazel; installs Debian's bazel-bootstrap if it may
# make clean                                removes the environments and everything built
#
# Environments live in .venv and .venvs/, and are made again when pyproject.toml changes.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: demo test lint format bench sanitize wheel bazel clean

comma := ,
CXX_FILES := $(wildcard csrc/*.cc csrc/*.h csrc/*.inc csrc/tensorflow/*.cc)
CXX_TESTS := $(wildcard tests/cuda_emulation/*.cc tests/cuda_emulation/*.h tests/cuda_host/*.cc tests/cuda_host/*.h)
SOURCES := setup.py recom_jax/version.py $(CXX_FILES)
PIP := -m pip --quiet --disable-pip-version-check
NO_PYTHON := echo "error: no usable Python 3.11 or newer. On Debian or Ubuntu: apt-get install \
python3 python3-venv python3-dev" >&2; exit 1

# The oldest and the newest JAX that are supported, each on the Python it needs.
PYTHON_OLD := $(shell tools/find-python 11)
PYTHON_NEW := $(shell tools/find-python 12)
OLD := .venvs/py3.11-jax0.10.2
NEW := .venvs/py3.12-jax0.12.0.1
TEST_ENVS := $(if $(PYTHON_OLD),$(OLD)) $(if $(PYTHON_NEW),$(NEW))
LINT_ENV := $(firstword $(TEST_ENVS))

TOUR := .venv$(if $(CUDA),-cuda)
PYTHON_TOUR := $(or $(PYTHON_OLD),$(PYTHON_NEW),$(shell tools/find-python 13 14))

# $(call environment,FOLDER,PYTHON,WHAT PIP INSTALLS)
define environment
$(1)/.made: pyproject.toml
	@if [ -z "$(2)" ]; then $(NO_PYTHON); fi
	@echo "== making $(1) with $(2)"
	rm -rf $(1)
	"$(2)" -m venv $(1)
	$(1)/bin/python $(PIP) install --upgrade pip
	@touch $$@

$(1)/.built: $(1)/.made $(SOURCES)
	@echo "== installing the package into $(1)"
	$(1)/bin/python $(PIP) install $(3)
	@touch $$@
endef

# TensorFlow and the other libraries of models come with the first one alone.
$(eval $(call environment,$(OLD),$(PYTHON_OLD),--editable ".[test$(comma)lint$(comma)tf$(comma)corun$(comma)idioms$(comma)checkpoints]" jax==0.10.2 jaxlib==0.10.2))
$(eval $(call environment,$(NEW),$(PYTHON_NEW),--editable ".[test$(comma)lint]" jax==0.12.0.1 jaxlib==0.12.0.1))
$(eval $(call environment,$(TOUR),$(PYTHON_TOUR),--editable ".[demo$(comma)bench$(if $(CUDA),$(comma)cuda)]"))

demo: $(TOUR)/.built
	$(TOUR)/bin/python -m examples.demo $(if $(FULL),--full) $(if $(BATCH),--batch $(BATCH))

bench: $(TOUR)/.built
	$(TOUR)/bin/python -m benchmarks $(ARGS)

# Goes through all of it before it fails, so that one run shows every fault. A file's tests stay together: they share
# what they compile.
test: $(TEST_ENVS:=/.built)
	@if [ -z "$(strip $(TEST_ENVS))" ]; then $(NO_PYTHON); fi
	@failed=; only=(); \
	$(MAKE) --no-print-directory lint || failed+=" lint"; \
	for env in $(TEST_ENVS); do \
	  echo "== pytest in $$env"; \
	  $$env/bin/python -m pytest -n 2 --dist loadfile --durations=25 "$${only[@]}" $(ARGS) || failed+=" $$env"; \
	  only=(-m "not once"); \
	done; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed" >&2; exit 1; fi

lint: $(LINT_ENV)/.built
	@failed=; \
	echo "== ruff";         $(LINT_ENV)/bin/ruff check . || failed+=" ruff"; \
	echo "== mypy";         $(LINT_ENV)/bin/mypy || failed+=" mypy"; \
	echo "== clang-format"; $(LINT_ENV)/bin/clang-format --dry-run --Werror $(CXX_FILES) $(CXX_TESTS) \
	  || failed+=" clang-format"; \
	if [ -n "$$failed" ]; then echo "lint failed:$$failed" >&2; exit 1; fi

format: $(LINT_ENV)/.built
	$(LINT_ENV)/bin/ruff check --fix-only --quiet .
	$(LINT_ENV)/bin/ruff format .
	$(LINT_ENV)/bin/clang-format -i $(CXX_FILES) $(CXX_TESTS)

# Goes through both before it fails.
sanitize: $(LINT_ENV)/.built
	$(LINT_ENV)/bin/python $(PIP) install "pybind11>=2.13"
	@failed=; \
	for kind in address thread; do tools/sanitize $(LINT_ENV)/bin/python $$kind || failed+=" $$kind"; done; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed" >&2; exit 1; fi

wheel:
	@if [ -z "$(PYTHON_TOUR)" ]; then $(NO_PYTHON); fi
	tools/check_wheel "$(PYTHON_TOUR)"

bazel: $(LINT_ENV)/.built
	$(LINT_ENV)/bin/python $(PIP) install "pybind11>=2.13"
	tools/bazel_build $(LINT_ENV)/bin/python

clean:
	rm -rf .venv .venv-cuda .venvs build dist *.egg-info recom_jax/*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
