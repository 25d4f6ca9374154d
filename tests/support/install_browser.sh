#!/bin/sh
# Installs what tests/support/browser.py needs; exits 3 with one line where it may not.
set -eu

packages="chromium chromium-driver"

here=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
if (cd "$here" && "${PYTHON:-python3}" -m tests.support.browser) 2>/dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "no browser for the tests: as root, install $packages (Debian's names)" >&2
    exit 3
fi

export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # the list is meant to be split
apt-get install -y --no-install-recommends $packages ||
    { apt-get update && apt-get install -y --no-install-recommends $packages; }
