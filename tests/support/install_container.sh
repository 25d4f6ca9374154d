#!/bin/sh
# Installs what tests/support/container_image.py needs; exits 3 with one line where it may not.
set -eu

packages="charliecloud-runtime"

if command -v ch-run >/dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "no containers for the tests: as root, install $packages (Debian's name)" >&2
    exit 3
fi

export DEBIAN_FRONTEND=noninteractive
apt-get install -y --no-install-recommends $packages ||
    { apt-get update && apt-get install -y --no-install-recommends $packages; }
