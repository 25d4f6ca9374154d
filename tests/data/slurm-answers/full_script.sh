#!/bin/bash
#SBATCH --job-name=gpt-small
#SBATCH --nodes=2-4
#SBATCH --gpus-per-node=4
#SBATCH --mincpus=24
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --partition=gpu,long
#SBATCH --account=lab
#SBATCH --qos=normal
#SBATCH --constraint="a100&ib"
#SBATCH --reservation=maint
#SBATCH --exclude="n[1-2]"
#SBATCH --network=single_node_vni,job_vni
#SBATCH --signal=USR2@90
#SBATCH --open-mode=append
#SBATCH --output=/runs/gpt-small/jobs/gpt-small-12ab.out
#SBATCH --requeue
#SBATCH --switches=1
#SBATCH "--comment=two words"

# Written by hpctrain; it is what was submitted, so change settings and resume instead.
export HPCTRAIN_RUN_DIR=/runs/gpt-small
export HPCTRAIN_TOKEN=gpt-small-12ab
export HPCTRAIN_PYTHON=/opt/venv/bin/python
hpctrain_srun_args=(--cpus-per-task=24 --mpi=none '--x=two words')
hpctrain_setup() {
hpctrain_lines_of=slurm.setup
module load cuda
echo 'ready'
:
}

# shellcheck shell=bash
# The part of a batch script that hpctrain needs. `hpctrain submit` puts it into its scripts word
# for word, and a hand-written script ends by sourcing it (see train.sbatch). It expects
#   HPCTRAIN_RUN_DIR     the run's directory, the same path on every node
#   HPCTRAIN_PYTHON      the interpreter in which hpctrain is installed
#   hpctrain_srun_args   optional array of more srun options
#   hpctrain_setup       optional function, run on the first node before srun; if a command in it
#                        fails, the start ends there, unless hpctrain_setup_may_fail is 1
#   hpctrain_container   optional function, run after it: sets hpctrain_task, the words in front of a
#                        task's -m (its python, or what starts a container and the python in it), and
#                        hpctrain_outside, the words in front of srun; may add to hpctrain_srun_args
#   hpctrain_stage       optional function, run after that where the run is to be staged: stage.sh's
# and it ends the script with the run's exit code.

# SLURM signals the batch shell too (SIGTERM at a preemption or the time limit, SIGKILL after
# KillWait). An untrapped SIGTERM would end this script here, and nobody would be left to requeue
# the job.
set +o posix # POSIXLY_CORRECT sets it: a second `wait` for one process then fails
trap '' USR1 USR2 HUP
hpctrain_term=0 hpctrain_users_term="" hpctrain_users_exit=""
trap 'hpctrain_term=1' TERM
HPCTRAIN_BATCH_STARTED=$(date +%s.%N)

: "${HPCTRAIN_RUN_DIR:?is not set: it names the directory that hpctrain submit printed}"
: "${HPCTRAIN_PYTHON:?is not set: it names the python in which hpctrain is installed}"
HPCTRAIN_TOKEN=${HPCTRAIN_TOKEN:-}
export HPCTRAIN_RUN_DIR HPCTRAIN_PYTHON HPCTRAIN_TOKEN HPCTRAIN_BATCH_STARTED
readonly HPCTRAIN_RUN_DIR HPCTRAIN_TOKEN # setup that unsets them by a pattern fails, with its line

# However this script ends, its last act says why, and decides whether the job comes back.
hpctrain_why="" hpctrain_is_over="" hpctrain_path=$PATH hpctrain_python=$HPCTRAIN_PYTHON
hpctrain_last_act() { # the script's exit code
  hpctrain_is_over=1
  PATH=${PATH:+$PATH:}$hpctrain_path # it asks SLURM, and setup may have ended half-way
  trap '' TERM
  local words=(--rc "$1" --term "$hpctrain_term")
  [ -z "$hpctrain_why" ] || words+=(--why "$hpctrain_why")
  [ -z "$hpctrain_why" ] || echo "hpctrain: error: $hpctrain_why" >&2
  "${HPCTRAIN_PYTHON:-$hpctrain_python}" -P -m hpctrain.entry.slurm_batch after "$HPCTRAIN_RUN_DIR" "$HPCTRAIN_TOKEN" \
    "${words[@]}"
}
# shellcheck disable=SC2329 # the trap calls it
hpctrain_at_exit() {
  hpctrain_rc=$?
  trap - ERR
  set +eu
  if [ -z "$hpctrain_is_over" ]; then
    hpctrain_why="${hpctrain_in-its batch script} ended the batch script, by exit $hpctrain_rc"
    hpctrain_last_act "$hpctrain_rc"
    hpctrain_rc=$?
  fi
  hpctrain_heed_term
  (eval "$hpctrain_users_exit")
  exit "$hpctrain_rc"
}
hpctrain_heed_term() { # runs what setup wants done at TERM, once, and in no trap: wait would err
  if [ "$hpctrain_term" = 1 ]; then
    (eval "$hpctrain_users_term")
    hpctrain_users_term=""
  fi
}
trap hpctrain_at_exit EXIT

# Traps that setup sets for its end, and for TERM, run beside those of this script.
# shellcheck disable=SC2329 # setup calls it
hpctrain_trap() {
  local action name others=()
  if [ "$BASHPID" != "$$" ] || [ $# = 0 ] || [[ $1 == -[lp]* ]]; then
    # shellcheck disable=SC2064 # setup has quoted it
    builtin trap "$@"
    return
  fi
  [ "$1" != -- ] || shift
  if [ $# = 1 ]; then action=-; else action=$1 && shift; fi
  for name; do
    case ${name#SIG} in
      EXIT | 0) hpctrain_users_exit=${action#-} ;;
      TERM | 15) hpctrain_users_term=${action#-} ;;
      *) others+=("$name") ;;
    esac
  done
  # shellcheck disable=SC2064
  [ ${#others[@]} = 0 ] || builtin trap -- "$action" "${others[@]}"
}

# A command of setup that fails would leave every rank in another environment, for weeks unnoticed.
# Only setup's own commands count: what a function or a sourced file tries inside is its own affair.
# shellcheck disable=SC2329 # the trap calls it
hpctrain_setup_failed() { # exit code, function and process, file, number of the line in it
  [ "$2" = "hpctrain_setup.$$" ] || return "$1"
  local line
  line=$(PATH=$PATH:$hpctrain_path sed -n "$4{s/^[[:space:]]*//;p}" "$3")
  hpctrain_setup_has_failed \
    "a line of ${hpctrain_lines_of:-hpctrain_setup} ended with exit code $1: $line"
}
hpctrain_setup_has_failed() { # why
  if [ "${hpctrain_setup_may_fail:-}" = 1 ]; then
    echo "hpctrain: warning: $1" >&2
  else
    hpctrain_why=$1
    hpctrain_last_act 3
    exit
  fi
}
if declare -F hpctrain_setup >/dev/null; then
  hpctrain_in="its setup"
  set -E
  # In one line, for $LINENO counts those of the trap.
  trap 'hpctrain_setup_failed $? "${FUNCNAME[0]:-}.$BASHPID" "${BASH_SOURCE[0]}" "$LINENO"' ERR
  # shellcheck disable=SC2329 # setup may call it
  trap() { hpctrain_trap "$@"; }
  hpctrain_setup
  hpctrain_rc=$?
  unset -f trap
  trap - ERR
  if [ "$hpctrain_rc" != 0 ] && [ -n "${hpctrain_lines_of:-}" ]; then # its last command is `:`
    hpctrain_setup_has_failed "$hpctrain_lines_of returned $hpctrain_rc before its end"
  fi
  set +E
  unset hpctrain_in
fi
# A setup with `set -e` must not keep a failed srun from being looked after.
set +eu +o posix
export HPCTRAIN_PYTHON=${HPCTRAIN_PYTHON:-$hpctrain_python}
for hpctrain_name in srun scontrol mkdir rm; do
  if ! command -v "$hpctrain_name" >/dev/null &&
    PATH=$hpctrain_path command -v "$hpctrain_name" >/dev/null; then
    echo "hpctrain: warning: setup has taken commands off PATH ($hpctrain_name); they are back at" \
      "its end" >&2
    PATH=${PATH:+$PATH:}$hpctrain_path
  fi
done

# -P: the script runs where submit was typed, and a json.py that lies there is not to be ours.
# Port, end of the job, KillWait, nodes in order, address of the first one.
# The child ignores SIGTERM, which SLURM sends to every process that it finds.
hpctrain_exports=$(
  trap '' TERM
  exec "$HPCTRAIN_PYTHON" -P -m hpctrain.entry.slurm_batch before "$HPCTRAIN_RUN_DIR" "$HPCTRAIN_TOKEN"
)
hpctrain_rc=$? # where it failed no agent is started, and the end of this script looks after that
eval "$hpctrain_exports"

hpctrain_task=("$HPCTRAIN_PYTHON") hpctrain_outside=()
if declare -F hpctrain_container >/dev/null; then hpctrain_container; fi
if [ -n "${hpctrain_stage_wanted:-}" ] && [ "$hpctrain_term$hpctrain_rc" = 00 ]; then
  if ! declare -F hpctrain_stage >/dev/null; then
    # shellcheck source=sbatch/stage.sh
    source "${BASH_SOURCE[0]%/*}/stage.sh"
  fi
  hpctrain_stage
fi

if [ "$hpctrain_term" = 1 ]; then
  hpctrain_rc=143
elif [ "$hpctrain_rc" = 0 ]; then
  # One task per node, the agent. It sees all CPUs and GPUs of the node; ranks and their binding are
  # its own affair.
  (umask 077 && mkdir -p "$HPCTRAIN_RUN_DIR/jobs") # srun starts no task whose output it cannot open
  hpctrain_output=$HPCTRAIN_RUN_DIR/jobs/${HPCTRAIN_TOKEN:-job-$SLURM_JOB_ID}
  if declare -F hpctrain_container >/dev/null; then
    # Inside nobody can ask SLURM, so a process out here does, and outlives the SIGTERM of a stop.
    export HPCTRAIN_RELAY=$hpctrain_output.port
    rm -f "$HPCTRAIN_RELAY" # of an earlier start
    (
      trap '' TERM
      exec "$HPCTRAIN_PYTHON" -P -m hpctrain.entry.slurm_batch relay "$HPCTRAIN_RUN_DIR"
    ) &
    hpctrain_relay=$!
    disown 2>/dev/null # so that bash says nothing of its end; it may be over already
  fi
  hpctrain_files=("--output=$hpctrain_output-%t.out" --open-mode=append)
  hpctrain_own=
  case $hpctrain_output in
    # A percent sign would have to be doubled, which srun undoes once or (since 25.11) twice: then
    # each task opens its file by itself.
    *%*) hpctrain_files=() hpctrain_own=$hpctrain_output ;;
  esac
  # Beside the ranks, where SLURM's commands are, somebody looks after the run's evaluations.
  hpctrain_watcher=
  if [ -n "$hpctrain_evaluate" ]; then
    (
      trap '' TERM
      exec "$HPCTRAIN_PYTHON" -P -m hpctrain.entry.evaluations "$HPCTRAIN_RUN_DIR" watch
    ) &
    hpctrain_watcher=$!
    disown 2>/dev/null
  fi
  # Where the run outlives its nodes the agents see to each other, and SLURM ends nothing.
  hpctrain_on_loss=(--kill-on-bad-exit=1) HPCTRAIN_ALIVE=
  if [ -n "${hpctrain_alive:-}" ]; then
    hpctrain_on_loss=(--kill-on-bad-exit=0 --no-kill) HPCTRAIN_ALIVE=1
  fi
  export HPCTRAIN_ALIVE
  # What ends a `wait` may take the status of a child that ends in the same moment with it: srun's
  # exit code comes through a pipe.
  exec {hpctrain_told}<> <(:)
  (
    trap : TERM # srun has its default again
    # shellcheck disable=SC2016,SC2154 # expanded on the task's own node; the array is optional
    "${hpctrain_outside[@]}" \
      srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none \
      "${hpctrain_on_loss[@]}" --wait=0 --unbuffered "${hpctrain_files[@]}" "${hpctrain_srun_args[@]}" \
      bash -c \
      'trap "" TERM USR1 USR2 HUP; [ -z "$2" ] || exec >>"$2-$SLURM_PROCID.out" 2>&1 || exit
      run=$1; shift 2
      command -v "$1" >/dev/null ||
        { echo "hpctrain: error: $SLURMD_NODENAME has no $1 on its PATH" >&2; exit 127; }
      exec "$@" -P -u -m hpctrain.entry.slurm_task "$run"' \
      hpctrain "$HPCTRAIN_RUN_DIR" "$hpctrain_own" "${hpctrain_task[@]}" {hpctrain_told}>&-
    hpctrain_rc=$?
    echo "$hpctrain_rc" >&"$hpctrain_told"
    exit "$hpctrain_rc"
  ) &
  hpctrain_srun=$!
  # A signal that is trapped ends `wait`, not srun: wait until srun is really gone.
  while kill -0 "$hpctrain_srun" 2>/dev/null; do
    wait "$hpctrain_srun"
    hpctrain_heed_term
  done
  wait "$hpctrain_srun"
  hpctrain_rc=$?
  if read -r -t 1 -u "$hpctrain_told" hpctrain_said; then hpctrain_rc=$hpctrain_said; fi
  # It ends by itself; a job that is to be requeued has no time to wait for it.
  [ -z "$hpctrain_watcher" ] || kill -INT "$hpctrain_watcher" 2>/dev/null
fi
if [ -n "${hpctrain_relay:-}" ]; then kill -KILL "$hpctrain_relay" 2>/dev/null; fi

# Requeues where no agent could any more. From here on nothing but SIGKILL ends this script.
hpctrain_last_act "$hpctrain_rc"
exit
