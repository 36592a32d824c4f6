#!/usr/bin/env bash
# Install Debian packages (200 MB) for the tests marked slurm: Slurm with accounting, and a compiler for the test plugin.
set -euo pipefail
command -v slurmctld slurmdbd mariadbd munged >/dev/null && [ -f /usr/include/slurm/spank.h ] && exit 0
packages="slurm-wlm slurmdbd munge mariadb-server libslurm-dev gcc libc6-dev"
[ "$(id -u)" -eq 0 ] || { echo "the Slurm tests need root and: apt-get install -y --no-install-recommends $packages" >&2; exit 1; }
apt-get update -qq >/dev/null 2>&1 || true
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 $packages >/dev/null
