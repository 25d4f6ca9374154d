#!/bin/sh
# Installs what tests/support/slurm_cluster.py needs; exits 3 with one line where it may not.
set -eu

packages="slurm-wlm munge slurmdbd mariadb-server slurm-wlm-mysql-plugin"

here=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
if (cd "$here" && "${PYTHON:-python3}" -m tests.support.slurm_boot) 2>/dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "no SLURM for the tests: as root, install $packages (Debian's names)" >&2
    exit 3
fi

# Debian starts the daemons of fresh packages; the tests start their own, so nothing may start here.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # the list is meant to be split
apt-get install -y --no-install-recommends $packages ||
    { apt-get update && apt-get install -y --no-install-recommends $packages; }
