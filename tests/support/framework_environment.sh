#!/usr/bin/env bash
# framework_environment.sh FOLDER PACKAGE...: an environment with those packages, for `make soak`.
# It has the packages of the environment that python is of, torch among them, with these and what
# they need of other versions before them. Prints the path of its python.
set -euo pipefail
folder=$1
shift
python=$folder/bin/python
python -m venv --without-pip "$folder"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
  >"$site/zz_behind.pth"
python -m pip --python "$python" install -q --no-cache-dir --disable-pip-version-check "$@" >&2
# The checkout that asks is the one that is tried, also by processes that start elsewhere.
(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) >"$site/checkout.pth"
echo "$python"
