# make setup             create .venv with the versions of requirements.txt (the other targets do it, too)
# make demo              train a tiny GPT-OSS to use Python: SFT, then RL (runs/tiny_retool/report.html)
# make test              run the tests that need neither GPU nor Slurm
# make test-slow         run slow tests, and variations of other tests
# make test-numerics     run numeric tests with the kernels of other processors, with 1 and 2 threads (2 hours)
# make test-busy         run tests of processes and time limits on a busy machine (two busy loops)
# make test-slurm        test the launcher with a real Slurm of four nodes (as root; installs it; takes minutes)
# make test-browser      test the viewer in Chromium (installs it as root)
# make hub-environments  create virtual environments for openenv and verifiers, which conflict with this project
# make wheel             build the wheels of this project and of its kernels in dist
# make lint              run ruff, mypy, the dependency rules and the prose checks
# make docs              build the documentation site build/docs/index.html (a broken link is an error)

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-numerics test-busy test-slurm test-browser hub-environments wheel lint docs clean-venv

GPTOSS := .venv/bin/gptoss
# SLURM_TESTS="slurm and not slow" leaves out the test that takes 3 minutes.
SLURM_TESTS := slurm
# BROWSER_TESTS=picture_of runs only tests whose names contain picture_of.
BROWSER_TESTS :=
# Options of scripts/numeric_tests.py, such as --processor Haswell.
NUMERICS :=
# Tests of processes, servers, time limits and Ray. Other tests only compute. On a busy machine, they are slower but do
# not fail.
BUSY_TESTS := tests/launch tests/rl_loop tests/faults benchmarks/tests tests/test_distributed_helper.py tests/test_leftover_processes.py
# Number of busy loops.
BUSY_LOOPS := 2
# Packages that mypy checks.
TYPED_PACKAGES := kernels/gptoss_kernels megatron_gptoss converters rl_loop launch gptoss_command.py

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup:
	@scripts/bootstrap.sh

# --overwrite replaces the runs of an earlier demo.
demo: setup
	$(GPTOSS) sft configs/sft/tiny_retool.yaml --overwrite
	$(GPTOSS) rl configs/rl/tiny_retool.yaml --overwrite

# One thread per process, because the models are tiny and many tests start two processes. Three tests at a time on two
# cores, because tests with Ray wait for processes to start. conftest.py distributes them. The time limit includes the
# wait for processors. PYTHONDONTWRITEBYTECODE would make every process that a test starts compile our modules again.
test: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not gpu and not slurm and not slow and not browser" -n 3 \
		--timeout=600 --durations=10

test-slow: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest \
		-m "slow and not gpu and not slurm and not browser" -n 2 --timeout=1200 --durations=10

# NUMERICS=--sample runs a few files for two processors. CI uses it.
test-numerics: setup
	PYTHONDONTWRITEBYTECODE= .venv/bin/python scripts/numeric_tests.py $(NUMERICS)

# GPTOSS_TEST_LOAD is the number of busy loops (tests/support/load.py). BUSY_TESTS=tests runs all tests.
test-busy: setup
	GPTOSS_TEST_LOAD=$(BUSY_LOOPS) OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(BUSY_TESTS) \
		-m "not gpu and not slurm and not slow and not browser" -n 2 --timeout=1200 --durations=10

# One machine simulates four nodes, so the tests run in sequence and need a long time limit.
test-slurm: setup
	@tests/slurm/install.sh
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/slurm -m "$(SLURM_TESTS)" --timeout=600 --durations=10 -s

test-browser: setup
	@tests/launch/viewer/install.sh
	PYTHONPATH=.cache/browser OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/launch/viewer -m browser --timeout=300 \
		-k "$(BROWSER_TESTS)"

# Both packages need an older mcp than this project. `pytest -m hub` and the option `python` of an agent use these
# environments.
hub-environments: setup
	for package in openenv==0.10.0 verifiers==0.4.0; do \
		.venv/bin/python -m venv .cache/hub/$${package%%==*} && \
		.cache/hub/$${package%%==*}/bin/pip install --quiet $$package || exit 1; \
	done

# Without stale copies in build/lib, because setuptools would add deleted files to the wheel.
wheel: setup
	rm -rf build/lib kernels/build dist/gptoss_kernels-*.whl dist/megatron_gptoss-*.whl
	.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist ./kernels .
	@rm -rf build/lib build/bdist.* kernels/build
	@echo "install with: pip install dist/*.whl"

# A separate environment, because Sphinx only reads Markdown and needs no package of this project.
.cache/docs/complete: requirements-docs.txt | setup
	rm -rf .cache/docs
	.venv/bin/python -m venv .cache/docs
	.cache/docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--require-hashes -r requirements-docs.txt
	touch $@

# Build from scratch, because Sphinx does not repeat warnings about unchanged pages.
docs: .cache/docs/complete
	rm -rf build/docs
	.cache/docs/bin/python -m sphinx -W --keep-going -q -E -d build/docs-cache docs build/docs

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(TYPED_PACKAGES)
	.venv/bin/lint-imports
	.venv/bin/python scripts/prose.py --check

clean-venv:
	rm -rf .venv
