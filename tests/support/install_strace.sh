#!/bin/sh
# Installs what tests/support/file_operations.py needs; exits 3 with one line where it may not.
set -eu

packages="strace"

if command -v strace >/dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "no strace for the tests: as root, install $packages (Debian's name)" >&2
    exit 3
fi

export DEBIAN_FRONTEND=noninteractive
apt-get install -y --no-install-recommends $packages ||
    { apt-get update && apt-get install -y --no-install-recommends $packages; }
