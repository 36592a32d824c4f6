#!/usr/bin/env bash
# Install Debian's Chromium for the tests marked browser, and its driver and axe in a directory next to .venv.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if ! command -v chromium >/dev/null; then
    [ "$(id -u)" -eq 0 ] || { echo "the tests in a browser need root and: apt-get install -y chromium" >&2; exit 1; }
    apt-get update -qq >/dev/null 2>&1 || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 chromium >/dev/null
fi
[ -f .cache/browser/.complete ] && exit 0
.venv/bin/pip install -q --no-deps --upgrade --target .cache/browser playwright==1.65.2 axe-playwright-python==0.1.8 greenlet==3.5.6 pyee==16.0.1
touch .cache/browser/.complete
