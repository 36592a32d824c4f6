#!/usr/bin/env bash
# Creates .venv in this checkout from requirements.txt (versions and hashes). It can be repeated. A complete environment
# has .venv/.complete and is not changed. An interrupted, moved or outdated environment is repaired.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

# ensure_package REASON PACKAGE...: install Debian packages if the user is root. Otherwise print the command and exit.
ensure_package() {
    local reason=$1
    shift
    command -v apt-get >/dev/null || die "$reason is missing; install it with your package manager (on Debian: $*)"
    [ "$(id -u)" -eq 0 ] || die "$reason is missing; run: sudo apt-get install -y $*"
    say "installing $* ($reason)"
    # Ignore errors of the package lists. If a package is really unavailable, apt-get install fails.
    apt-get update -qq >/dev/null 2>&1 || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "$@" \
        >/dev/null || die "apt-get could not install $*; see its message above"
}

# find_python: print the first working interpreter of Python 3.12. A pyenv shim can exist without a Python behind it.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 /usr/bin/python3.12 /usr/local/bin/python3.12 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 python3 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            # Resolve a shim to its interpreter, so that .venv does not depend on the shim.
            "$candidate" -c 'import os, sys; print(os.path.realpath(sys.executable))'
            return
        fi
    done
    return 1
}

[ "$(uname -s)" = Linux ] || die "Linux is required, because the sandbox uses its namespaces. This system is $(uname -s)"

# A second bootstrap waits, because both would write to the same .venv. The lock is on a file that always exists.
if command -v flock >/dev/null; then
    exec 9<scripts/bootstrap.sh
    flock -n 9 || { say "another set-up of this checkout is running; waiting for it"; flock 9; }
fi

command -v bwrap >/dev/null || ensure_package "bubblewrap (the sandbox for model-written code)" bubblewrap
command -v cc >/dev/null || ensure_package "a C compiler (for the kernels)" gcc libc6-dev

stamp=.venv/.complete
key="$(cat requirements.txt pyproject.toml kernels/pyproject.toml | sha256sum | cut -c1-64) $(pwd -P)"
if [ "$(cat $stamp 2>/dev/null)" != "$key" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python) ||
        die "Python 3.12 is missing: install python3.12 (Debian/Ubuntu) or run 'pyenv install 3.12', or set PYTHON=/path/to/python3.12"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || ensure_package "Python's venv module" python3.12-venv

    # Update only an environment that was completed in this directory. Otherwise create it again, because an incomplete
    # environment can look complete.
    if [ "$(cut -d' ' -f2- $stamp 2>/dev/null)" != "${key#* }" ] || ! .venv/bin/python -c '' 2>/dev/null; then
        free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024 / 1024))
        [ -d .venv ] || [ "$free_gb" -ge 7 ] || die "the environment needs 7 GB of disk, $PWD has $free_gb GB free"
        say "creating .venv with $("$python" -V)"
        rm -rf .venv
        "$python" -m venv .venv || die "could not create .venv with $python; see the message above"
    fi
    rm -f $stamp
    # -qq prints errors but no warnings. --only-binary with --no-binary builds only packages that have no wheel.
    without_wheel=cellpylib,langdetect,pycosat,zss
    pip=(.venv/bin/python -m pip install -qq --no-input --disable-pip-version-check --root-user-action=ignore --no-deps)
    say "installing $(grep -c '^[a-z]' requirements.txt) pinned packages (5 GB, one to a few minutes)"
    "${pip[@]}" --only-binary :all: --no-binary "$without_wheel" --require-hashes -r requirements.txt ||
        die "pip could not install requirements.txt; see its message above (run make again to continue)"
    "${pip[@]}" --no-build-isolation --editable ./kernels --editable . ||
        die "pip could not install this project; see its message above"
    printf '%s\n' "$key" >$stamp
    say "environment ready: .venv"
fi

# Download the vocabulary file of openai-harmony. It is cached outside the checkout, and its hash is checked every time.
.venv/bin/python -m rl_loop.harmony.o200k >/dev/null || die "the o200k vocabulary for Harmony could not be set up; see the message above"
