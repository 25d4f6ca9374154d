#!/usr/bin/env bash
# The tests of `make check`: on this machine's SLURM, and those that depend on its version on the
# others. The systems for these are made at once; their tests begin when no test on this machine's
# SLURM is left: beside those they missed time limits (4 of 94 needed a second run).
set -euo pipefail

folder=$(mktemp -d)
left=$folder/no-cluster-left # see two_clusters.py

other_versions() {
  nice make slurm-systems || return
  until [ -e "$left" ]; do
    kill -0 $$ || return # with this script's end nobody makes the file
    sleep 1
  done
  make slurm-versions
}

set -m # a group of its own, so that Ctrl-C here ends all of it
(set +e; other_versions; echo $? >"$folder/status") >"$folder/versions" 2>&1 &
set +m
others=$!
trap 'kill -- -"$others" 2>/dev/null || true; rm -rf "$folder"' EXIT

landing=0
HPCTRAIN_NO_CLUSTER_LEFT=$left make landing-tests || landing=$?
touch "$left"
wait "$others" || true
cat "$folder/versions"
[ "$landing" -eq 0 ] && [ "$(cat "$folder/status")" = 0 ]
