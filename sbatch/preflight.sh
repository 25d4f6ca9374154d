# shellcheck shell=bash
# What a preflight's job does: one task on each node, which meet by themselves. Like body.sh it
# stands behind the header that hpctrain writes. Nothing is requeued, nothing on a node is changed.

: "${HPCTRAIN_RUN_DIR:?is not set: it names the directory of the preflight}"
: "${HPCTRAIN_PYTHON:?is not set: it names the python in which hpctrain is installed}"
HPCTRAIN_PREFLIGHT_KEY=$(<"$HPCTRAIN_RUN_DIR/@key")
export HPCTRAIN_PREFLIGHT_KEY HPCTRAIN_RUN_DIR HPCTRAIN_PYTHON

if declare -F hpctrain_setup >/dev/null; then hpctrain_setup; fi
set +eu

hpctrain_exports=$(
  exec "$HPCTRAIN_PYTHON" -P -m hpctrain.entry.slurm_batch before "$HPCTRAIN_RUN_DIR" "$HPCTRAIN_TOKEN"
) || exit
eval "$hpctrain_exports"

hpctrain_task=("$HPCTRAIN_PYTHON") hpctrain_outside=()
if declare -F hpctrain_container >/dev/null; then hpctrain_container; fi

# Output goes through srun, not into files of the tasks: a node that does not see the shared
# directory could not open one, and its task would not start to tell so. A node whose task fails
# must not take the others with it.
# shellcheck disable=SC2016,SC2154 # expanded on the task's own node; the array is optional
exec "${hpctrain_outside[@]}" \
  srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none \
  --kill-on-bad-exit=0 --wait=0 --unbuffered --label "${hpctrain_srun_args[@]}" \
  bash -c 'run=$1; shift; exec "$@" -P -u -m hpctrain.cluster.preflight.node "$run" "$SLURM_NODEID"' \
  hpctrain "$HPCTRAIN_RUN_DIR" "${hpctrain_task[@]}"
