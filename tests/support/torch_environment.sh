#!/usr/bin/env bash
# torch_environment.sh VERSION FOLDER: an environment with that torch, for `make torch-versions`.
# It has the packages of the environment that python is of, with the other torch before them.
# Some 7 GB; wheels are not kept. Prints the path of its python.
set -euo pipefail
version=$1
folder=$2/$version
python=$folder/bin/python
if [ ! -e "$folder/.ready" ]; then
  rm -rf "$folder"
  python -m venv --without-pip "$folder"
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  python -m pip --python "$python" install -q --no-cache-dir --disable-pip-version-check \
    "torch==$version" >&2
  python -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$site/behind.pth"
  python -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
    >>"$site/behind.pth"
  touch "$folder/.ready"
fi
# The checkout that asks is the one that is tried, also by processes that start elsewhere.
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$top" >"$site/checkout.pth"
echo "$python"
