# Trainer and engine in one image. Each layer is built from a pinned file with hashes, so builds are repeatable. Changed
# code rebuilds only the last two layers.
#
#   docker build -t gptoss .                      for GPUs; compiles Transformer Engine's torch extension
#   docker build -t gptoss-cpu --target trainer --build-arg BASE=python:3.12-bookworm --build-arg PYTHON_PACKAGES= \
#       --build-arg GPU=0 .                       for CPUs: the tiny configurations, conversion, plans
ARG BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

FROM ${BASE} AS base
# Empty if the base image has Python 3.12.
ARG PYTHON_PACKAGES="python3.12 python3.12-venv python3.12-dev"
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ${PYTHON_PACKAGES} bubblewrap g++ gcc git libc6-dev libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

# A separate environment, because the requirements of SGLang and of the trainer conflict.
FROM base AS engine
COPY launch/pinned/sglang.txt /tmp/sglang.txt
RUN python3.12 -m venv /opt/sglang \
    && /opt/sglang/bin/python -m pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes \
        -r /tmp/sglang.txt

FROM base AS trainer
WORKDIR /opt/gptoss
COPY requirements.txt requirements-gpu.txt ./
# Four packages have no wheel and are built. scripts/bootstrap.sh has the same list.
RUN python3.12 -m venv venv \
    && venv/bin/python -m pip install --no-cache-dir --no-deps --only-binary :all: \
        --no-binary cellpylib,langdetect,pycosat,zss --require-hashes -r requirements.txt

# NVTE_PYTORCH_FORCE_BUILD: compiled against this torch, not fetched from elsewhere.
ARG GPU=1
ARG MAX_JOBS=8
RUN [ "$GPU" = 0 ] || NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=$MAX_JOBS \
        venv/bin/python -m pip install --no-cache-dir --no-build-isolation --no-deps --require-hashes \
        -r requirements-gpu.txt

COPY . code/
ENV PATH=/opt/gptoss/venv/bin:$PATH
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation -e code/kernels -e code \
    && XDG_CACHE_HOME=/opt/gptoss python -m rl_loop.harmony.o200k
# Set for every user, because the home of a user may differ from root's.
ENV TIKTOKEN_ENCODINGS_BASE=/opt/gptoss/megatron-gptoss

FROM trainer AS complete
COPY --from=engine /opt/sglang /opt/sglang
