# shellcheck shell=bash disable=SC2154
# Brings the run's Python environment to the job's nodes, and has its tasks start from there. A
# script of `hpctrain submit` has this and stage_node.sh word for word; body.sh of a hand-written
# one sources it. What is to be brought, and where, `slurm_batch before` has said in variables
# hpctrain_stage_*, from staging.json in the run's directory.
#
# Nothing here ends the job: what cannot be brought is said, and tasks start as they would have.

hpctrain_stage() {
  local way=read began=$SECONDS
  hpctrain_stage_lines='' hpctrain_stage_sent=''
  if [ -z "$hpctrain_stage_why" ] && declare -F hpctrain_container >/dev/null; then
    hpctrain_stage_why='its ranks run in a container'
  fi
  if [ -z "$hpctrain_stage_why" ] && [ ! -r "$hpctrain_stage_archive" ]; then
    hpctrain_stage_why="$hpctrain_stage_archive cannot be read any more"
  fi
  if [ -z "$hpctrain_stage_why" ]; then
    : "${hpctrain_stage_node:=$(<"${BASH_SOURCE[0]%/*}/stage_node.sh")}"
    if command -v sbcast >/dev/null && hpctrain_stage_send; then way=sbcast; fi
    hpctrain_stage_step get
    if [ "$hpctrain_term" = 1 ]; then return; fi
    # shellcheck disable=SC2034 # body.sh's
    hpctrain_task=("${hpctrain_stage_words[@]}" run "${hpctrain_stage_facts[@]}" --
      "${hpctrain_stage_places[@]}" -- "$HPCTRAIN_PYTHON")
  fi
  printf '%s\n' "$hpctrain_stage_lines" |
    "$HPCTRAIN_PYTHON" -P -m hpctrain.entry.slurm_batch staged "$HPCTRAIN_RUN_DIR" \
      --way "$way" --seconds "$((SECONDS - began))" --why "$hpctrain_stage_why"
}

# By SLURM's own way, where all nodes lack it and have the same folder for it: then the shared file
# system is read by one node.
hpctrain_stage_send() {
  local -a nodes roots
  hpctrain_stage_step look
  mapfile -t nodes < <(grep -o ' need .*' <<<"$hpctrain_stage_lines")
  [ "${#nodes[@]}" = "$SLURM_NNODES" ] || return
  mapfile -t roots < <(printf '%s\n' "${nodes[@]# need }" | sort -u)
  [ "${#roots[@]}" = 1 ] || return
  hpctrain_stage_sent=${roots[0]}/$hpctrain_stage_key.sent-$SLURM_JOB_ID
  timeout "$hpctrain_stage_timeout" sbcast --force "$hpctrain_stage_archive" "$hpctrain_stage_sent" ||
    { hpctrain_stage_sent='' && return 1; }
}

# One task on each node; what they print is in hpctrain_stage_lines.
hpctrain_stage_step() {
  hpctrain_stage_words=(bash -c "$hpctrain_stage_node" hpctrain-stage)
  hpctrain_stage_facts=("key=$hpctrain_stage_key" "sha256=$hpctrain_stage_sha256"
    "archive=$hpctrain_stage_archive" "bytes=$hpctrain_stage_bytes"
    "unpacked=$hpctrain_stage_unpacked" "files=$hpctrain_stage_files"
    "compress=$hpctrain_stage_compress" "prefix=$hpctrain_stage_prefix"
    "python=$hpctrain_stage_python" "timeout=$hpctrain_stage_timeout"
    "sent=$hpctrain_stage_sent")
  hpctrain_stage_lines=$(
    timeout -k 10 "$((hpctrain_stage_timeout + 60))" \
      srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none \
      --kill-on-bad-exit=0 --wait=0 "${hpctrain_srun_args[@]}" --output=all \
      "${hpctrain_stage_words[@]}" "$1" "${hpctrain_stage_facts[@]}" -- \
      "${hpctrain_stage_places[@]}" |
      grep '^hpctrain-stage '
  )
}
