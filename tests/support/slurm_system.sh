#!/usr/bin/env bash
# Other versions of SLURM than this machine's, each in a small Debian of its own below one folder.
#
#   slurm_system.sh prepare VERSION      make the system, unless it is there (minutes, ~1 GB)
#   slurm_system.sh run VERSION CMD...   run CMD in it, in this folder, with the Python that is active
#
# Exits 3 with one line where it may not. HPCTRAIN_SLURM_SYSTEMS names the folder of the systems.
set -euo pipefail

cache=${HPCTRAIN_SLURM_SYSTEMS:-/var/cache/hpctrain/slurm-systems}
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}

# What install_slurm.sh installs; then what the tests call; then the libraries of a Python that was
# built on another Debian.
# slurmdbd's check of concat() fails with the client library of 11.8.9, trixie's and sid's by now
packages="slurm-wlm munge slurmdbd mariadb-server slurm-wlm-mysql-plugin libmariadb3/bookworm"
packages+=" bash procps iproute2 util-linux ca-certificates git hostname fuse3 openssh-client passwd"
packages+=" gcc libc6-dev"
packages+=" libssl3t64 libffi8 libsqlite3-0 libbz2-1.0 liblzma5 zlib1g libreadline8t64 libncursesw6"
packages+=" libuuid1 libexpat1 libcrypt1 libnsl2 libtirpc3t64 libstdc++6 libgomp1"

fail() {
  echo "$2" >&2
  exit "$1"
}

suite_of() {
  case $1 in
    24.11) echo trixie ;;
    26.05) echo sid ;;
    *) fail 2 "no system for SLURM $1: there are 24.11 and 26.05" ;;
  esac
}

# The archive that this machine's own apt takes Debian from.
mirror() {
  # shellcheck disable=SC2016  # apt's own variable
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' |
    sort -u | sed -n 1p
}

# How this machine's apt reaches it: proxies, certificates, credentials, and no index it leaves out.
pass_on_apt() {
  local root=$1 file
  apt-config dump | grep -E '^Acquire::[^:]*(http|https|ftp|Check|Retries|IndexTargets)' |
    grep -v '""' >"$root/etc/apt/apt.conf.d/00host" || true
  cat >>"$root/etc/apt/apt.conf.d/00host" <<'CONF'
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
APT::Install-Recommends "false";
CONF
  for file in /etc/apt/auth.conf /etc/apt/auth.conf.d /etc/resolv.conf; do
    [ ! -e "$file" ] || cp -aL "$file" "$root${file%/*}/"
  done
  mkdir -p "$root/etc/ssl/certs" "$root/usr/local/share"
  cp -aL /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  cp -a /usr/local/share/ca-certificates "$root/usr/local/share/"
}

# In namespaces of its own: whatever a package's script starts or mounts goes with it.
inside() {
  local root=$1
  shift
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child --propagation private \
    sh -c 'mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && root=$1 && shift &&
           exec chroot "$root" /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
                DEBIAN_FRONTEND=noninteractive "$@"' sh "$root" "$@"
}

build() {
  local version=$1 suite=$2 root=$3 source http_proxy=${http_proxy-} https_proxy=${https_proxy-}
  source=$(mirror)
  [ -n "$source" ] || { apt-get update -q && source=$(mirror); }
  [ -n "$source" ] || fail 3 "no SLURM $version: this machine's apt knows no archive of Debian"
  eval "$(apt-config shell http_proxy Acquire::http::Proxy https_proxy Acquire::https::Proxy)"
  export http_proxy https_proxy # debootstrap has no word of apt's
  debootstrap --variant=minbase "$suite" "$root" "$source"
  pass_on_apt "$root"
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" # the tests start the daemons
  chmod +x "$root/usr/sbin/policy-rc.d"
  echo "deb $source bookworm main" >"$root/etc/apt/sources.list.d/bookworm.list"
  inside "$root" apt-get update -q
  # shellcheck disable=SC2086  # the list is meant to be split
  inside "$root" apt-get install -q -y --no-install-recommends --allow-downgrades $packages
  inside "$root" apt-get clean
  local got
  # shellcheck disable=SC2016  # dpkg's own variable
  got=$(inside "$root" dpkg-query -W -f '${Version}' slurmctld)
  case $got in
    "$version".*) ;;
    *) fail 3 "no SLURM $version: Debian's $suite has $got by now" ;;
  esac
}

may_prepare() {
  [ "$(id -u)" -eq 0 ] || fail 3 "no SLURM $1 for the tests: root makes its system"
  command -v apt-get >/dev/null || fail 3 "no SLURM $1 for the tests: this is no Debian"
  command -v debootstrap >/dev/null ||
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends debootstrap >/dev/null ||
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends debootstrap >/dev/null; } ||
    fail 3 "no SLURM $1 for the tests: debootstrap cannot be installed"
}

is_prepared() {
  [ -e "$cache/$1/.prepared" ] && [ "$(cat "$cache/$1/.prepared")" = "$packages" ]
}

prepare() {
  local version=$1 suite fresh
  suite=$(suite_of "$version")
  ! is_prepared "$version" || return 0
  may_prepare "$version"
  mkdir -p "$cache"
  exec 9>"$cache/$version.lock"
  flock 9 # two that make it beside each other
  ! is_prepared "$version" || return 0
  rm -rf "$cache/$version".fresh.*
  fresh=$(mktemp -d "$cache/$version.fresh.XXXXXX")
  chmod 755 "$fresh"
  echo "making a system with SLURM $version in $cache/$version" >&2
  # a process of its own: bash does not leave at an error inside of a condition
  if ! bash "${BASH_SOURCE[0]}" build "$version" "$suite" "$fresh" >"$cache/$version.log" 2>&1; then
    tail -n 1 "$cache/$version.log" >&2
    rm -rf "$fresh"
    fail 3 "no SLURM $version for the tests: $cache/$version.log tells why"
  fi
  echo "$packages" >"$fresh/.prepared"
  rm -rf "${cache:?}/$version"
  mv "$fresh" "$cache/$version"
}

# Every folder and file that the active Python is made of; /usr itself is the system's own.
python_parts() {
  "$python" - <<'PY'
import os, sys
seen = {sys.prefix, sys.base_prefix, *map(os.path.realpath, (sys.prefix, sys.base_prefix))}
seen |= {os.path.realpath(sys.executable), *filter(os.path.exists, sys.path)}
print("\n".join(sorted(os.path.abspath(part) for part in seen - {"", "/", "/usr"})))
PY
}

# As the first process of namespaces of its own: puts the system's root together and goes there.
enter() {
  local version=$1 work=$2 part top
  shift 2
  local root=/mnt
  # Nobody writes into the system itself: all that CMD changes in it goes with the namespace.
  mount -t tmpfs -o mode=755 hpctrain-system "$root"
  mkdir "$root"/{upper,work,root}
  mount -t overlay -o "lowerdir=$cache/$version,upperdir=$root/upper,workdir=$root/work" \
    hpctrain-system "$root/root"
  root=$root/root
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev" # with /dev/shm and /dev/fuse
  bind "$work" "$root/tmp"
  top=$(git -C "$here" rev-parse --path-format=absolute --git-common-dir 2>/dev/null || true)
  { python_parts; printf '%s\n' "$here" "$PWD" "$top"; } | sort -u | while read -r part; do
    [ "${part:-/}" = / ] || bind "$part" "$root$part"
  done
  cp -L /etc/resolv.conf "$root/etc/resolv.conf"
  { cat /etc/hosts; echo "127.0.0.1 $(hostname)"; } >"$root/etc/hosts"
  local folder=$PWD
  cd "$root"
  mkdir -p .old
  pivot_root . .old # a chroot could make no user namespaces
  cd "$folder"
  umount -l /.old
  export TMPDIR=/tmp
  "$@" && status=0 || status=$? # not exec: this shell is init here, and reaps
  exit "$status"
}

bind() {
  if [ -d "$1" ]; then
    mkdir -p "$2"
  elif [ ! -e "$2" ]; then
    mkdir -p "${2%/*}"
    touch "$2"
  fi
  mount --bind "$1" "$2"
}

run() {
  local version=$1 work status
  shift
  suite_of "$version" >/dev/null
  [ -e "$cache/$version/.prepared" ] ||
    fail 3 "no SLURM $version in $cache: run $0 prepare $version"
  [ "$(id -u)" -eq 0 ] || fail 3 "only root may enter the system with SLURM $version"
  work=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-slurm.XXXXXX")
  chmod 1777 "$work"
  # shellcheck disable=SC2064  # now
  trap "rm -rf '$work'" EXIT
  status=0
  unshare --mount --pid --fork --kill-child --propagation private \
    bash "${BASH_SOURCE[0]}" enter "$version" "$work" "$@" || status=$?
  exit "$status"
}

case ${1-} in
  prepare) [ $# -eq 2 ] || fail 2 "slurm_system.sh prepare VERSION" ;;
  run | enter | build) [ $# -ge 3 ] || fail 2 "slurm_system.sh run VERSION CMD..." ;;
  *) fail 2 "slurm_system.sh prepare VERSION | run VERSION CMD..." ;;
esac
"$@"
