# make setup  makes .venv with the versions of requirements.txt; all others begin with it
# make demo   sets everything up and trains a tiny GPT-OSS to use Python: SFT, then RL (runs/tiny_retool/report.html)
# make test   sets everything up and runs the tests that need neither GPU nor Slurm
# make test-slow    the tests that make test leaves out because they take long, or repeat another with variations
# make test-numerics    the numeric tests with the kernels of other processors, one and two threads (two hours)
# make test-busy    those tests that processes and clocks take part in, with two busy loops beside them
# make test-slurm   as root: the launcher against a real Slurm of four nodes on this machine (installs it; several minutes)
# make test-browser  the viewer in a real Chromium (installs it as root)
# make hub-environments  virtual environments for openenv and verifiers, which cannot be installed beside this project
# make lint   ruff, mypy, the dependency rules and the habits of prose
# make docs   the documentation as a site with search: build/docs/index.html; a broken link is an error

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-numerics test-busy test-slurm test-browser hub-environments lint docs clean-venv

GPTOSS := .venv/bin/gptoss
# SLURM_TESTS="slurm and not slow" leaves out the one that takes three minutes.
SLURM_TESTS := slurm
# BROWSER_TESTS=picture_of takes those whose names hold it.
BROWSER_TESTS :=
# Options of scripts/numeric_tests.py, such as --processor Haswell.
NUMERICS :=
# Tests of processes, servers, time limits and Ray; the others compute, which takes longer on a busy machine and no more.
BUSY_TESTS := tests/launch tests/rl_loop tests/faults benchmarks/tests tests/test_distributed_helper.py tests/test_leftover_processes.py
# How many busy loops run beside them.
BUSY_LOOPS := 2
# The packages whose annotations are checked; all of them.
TYPED_PACKAGES := kernels/gptoss_kernels megatron_gptoss converters rl_loop launch gptoss_command.py

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup:
	@scripts/bootstrap.sh

# --overwrite: a second demo starts afresh instead of refusing.
demo: setup
	$(GPTOSS) sft configs/sft/tiny_retool.yaml --overwrite
	$(GPTOSS) rl configs/rl/tiny_retool.yaml --overwrite

# One thread per process, because the models are tiny and many tests start two processes. Three tests at a time on two
# cores, because tests with Ray wait for processes to start; conftest.py distributes them. The time limit includes the
# wait for processors. PYTHONDONTWRITEBYTECODE would make every process that a test starts compile our modules again.
test: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not gpu and not slurm and not slow and not browser" -n 3 \
		--timeout=600 --durations=10

test-slow: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest \
		-m "slow and not gpu and not slurm and not browser" -n 2 --timeout=1200 --durations=10

# NUMERICS=--sample takes a few files and two processors: what .ci/run does.
test-numerics: setup
	PYTHONDONTWRITEBYTECODE= .venv/bin/python scripts/numeric_tests.py $(NUMERICS)

# make test with GPTOSS_TEST_LOAD busy loops (tests/support/load.py); make test-busy BUSY_TESTS=tests runs them all.
test-busy: setup
	GPTOSS_TEST_LOAD=$(BUSY_LOOPS) OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(BUSY_TESTS) \
		-m "not gpu and not slurm and not slow and not browser" -n 2 --timeout=1200 --durations=10

# One machine plays four nodes, so the tests take turns; a loaded machine needs the longer limit.
test-slurm: setup
	@tests/slurm/install.sh
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/slurm -m "$(SLURM_TESTS)" --timeout=600 --durations=10 -s

test-browser: setup
	@tests/launch/viewer/install.sh
	PYTHONPATH=.cache/browser OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/launch/viewer -m browser --timeout=300 \
		-k "$(BROWSER_TESTS)"

# Both pin an mcp older than ours. pytest -m hub uses them, and `python:` of an agent's configuration can name them.
hub-environments: setup
	for package in openenv==0.10.0 verifiers==0.4.0; do \
		.venv/bin/python -m venv .cache/hub/$${package%%==*} && \
		.cache/hub/$${package%%==*}/bin/pip install --quiet $$package || exit 1; \
	done

# An environment of its own, because Sphinx reads Markdown and imports nothing of this project.
.cache/docs/complete: requirements-docs.txt | setup
	rm -rf .cache/docs
	.venv/bin/python -m venv .cache/docs
	.cache/docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--require-hashes -r requirements-docs.txt
	touch $@

# From scratch, because Sphinx repeats no warning about a page that it has already read.
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
