# make demo   sets everything up and trains a tiny GPT-OSS to use Python: SFT, then RL (runs/tiny_retool/report.html)
# make test   sets everything up and runs the tests that need neither GPU nor Slurm
# make test-slurm   as root: the launcher against a real Slurm of four nodes on this machine (installs it; several minutes)
# make lint   ruff, mypy and the dependency rule

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slurm lint clean-venv

GPTOSS := .venv/bin/gptoss
# make test-slurm SLURM_TESTS="slurm and not slow" leaves out the one that takes three minutes.
SLURM_TESTS := slurm
# The rooms whose annotations are checked; all of them.
TYPED_ROOMS := kernels/gptoss_kernels megatron_gptoss converters rl_loop launch

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup:
	@scripts/bootstrap.sh

# --overwrite: a second demo starts afresh instead of refusing.
demo: setup
	$(GPTOSS) sft configs/sft/tiny_retool.yaml --overwrite
	$(GPTOSS) rl configs/rl/tiny_retool.yaml --overwrite

# One thread per process: the models are tiny and several tests start two processes. Two at a time, shared out by
# tests/conftest.py. The time limit counts the wait for processors that both use.
test: setup
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not gpu and not slurm and not slow" -n 2 \
		--timeout=600 --durations=10

# One machine plays four nodes, so the tests take turns; a loaded machine needs the longer limit.
test-slurm: setup
	@tests/slurm/install.sh
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/slurm -m "$(SLURM_TESTS)" --timeout=600 --durations=10 -s

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(TYPED_ROOMS)
	.venv/bin/lint-imports

clean-venv:
	rm -rf .venv
