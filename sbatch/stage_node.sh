# shellcheck shell=bash
# A node's part of staging: the run's Python environment on the node's own disk or in its memory.
# sbatch/stage.sh starts it on every node of the job, by srun:
#
#   look FACTS -- PLACES           has this node the environment, or where would it go?
#   get FACTS -- PLACES            unpack it, unless it is there
#   run FACTS -- PLACES -- WORDS   start WORDS (a python first) from there, else as they are
#
# FACTS are NAME=VALUE: key (of the environment), sha256, archive (its file), bytes (of it), unpacked
# (bytes on a disk), files (in it, without bytecode), compress, prefix (where the environment lies),
# python (in it), timeout (seconds), sent (a copy that sbcast has left here, or empty). PLACES are
# folders, with $VARIABLES as they are here; the first that will do is taken.
#
# `look` and `get` print one line `hpctrain-stage NODE WORD ...`, where WORD is have, need, full,
# staged, reused or no. Nothing here fails a job: where a node cannot, it says why, and its ranks start from
# the shared environment. tests/unit/scheduler/test_stage_node.py holds the promises.
#
# In a place lies hpctrain-environments-UID, which nobody else can look into, and there
#   KEY        an environment, whole: it was renamed when it was
#   KEY.lock   shared by all that run from it, exclusive for who unpacks or removes it
#   KEY.new    one that is being unpacked

stage_verb=$1
shift
stage_key='' stage_sha256='' stage_archive='' stage_bytes=0 stage_unpacked=0 stage_files=0
stage_compress=none stage_prefix='' stage_python=bin/python stage_timeout=600 stage_sent=''
while [ "$#" -gt 0 ] && [ "$1" != -- ]; do
  printf -v "stage_${1%%=*}" %s "${1#*=}"
  shift
done
shift
stage_places=()
while [ "$#" -gt 0 ] && [ "$1" != -- ]; do
  stage_places+=("$1")
  shift
done
shift # what is left are the words to run

stage_root='' stage_why=''
say() {
  printf 'hpctrain-stage %s %s\n' "${SLURMD_NODENAME:-$(hostname)}" "$*"
}

# Why this node does without; the end of it, and no failure.
no() {
  say no "$*"
  exit 0
}

# $VARIABLES of a place by their values; nothing else of the shell's.
expanded() {
  local text=$1 done=''
  while [[ $text =~ ^([^$]*)\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?(.*)$ ]]; do
    text=${BASH_REMATCH[3]}
    [ -n "${!BASH_REMATCH[2]:-}" ] || return 1
    done+=${BASH_REMATCH[1]}${!BASH_REMATCH[2]}
  done
  printf %s "$done$text"
}

# Whether nobody but this user and root can put something else in the place of what lies in a
# folder.
is_kept() {
  local owner mode
  read -r owner mode < <(stat -L -c '%u %a' -- "$1" 2>/dev/null) || return 1
  [ "$owner" = 0 ] || [ "$owner" = "$EUID" ] || return 1
  ((!(8#$mode & 8#22) || 8#$mode & 8#1000))
}

# Sets stage_root to this user's folder in a place; 1 with stage_why where it must not be used.
take_place() {
  local place kind root found
  stage_root=''
  place=$(expanded "$1") || { stage_why="$1 has a variable that is not set here"; return 1; }
  [[ $place == /* ]] || { stage_why="$place is no absolute path"; return 1; }
  [ -d "$place" ] || { stage_why="$place is no folder here"; return 1; }
  kind=$(stat -f -c %T -- "$place" 2>/dev/null)
  case $kind in
    nfs* | lustre | gpfs | beegfs | fhgfs | ceph* | panfs | afs | cifs | smb* | fuse.sshfs | wekafs)
      stage_why="$place is shared ($kind)"
      return 1
      ;;
  esac
  is_kept "$place" || { stage_why="in $place others can move what lies there"; return 1; }
  root=$place/hpctrain-environments-$EUID
  mkdir -m 700 -- "$root" 2>/dev/null
  found=$(stat -c '%u %a %F' -- "$root" 2>/dev/null)
  case $found in
    "$EUID 700 directory") stage_root=$root ;;
    '') stage_why="$root cannot be made" ;;
    *) stage_why="$root is not this user's alone ($found)" ;;
  esac
  [ -n "$stage_root" ]
}

find_root() {
  local place
  for place in "${stage_places[@]}"; do
    take_place "$place" && return
  done
  return 1
}

# A cleaner of old files may have been here: the environment must have all of its files.
is_whole() {
  [ -d "$stage_root/$stage_key" ] || return 1
  local count
  count=$(find "$stage_root/$stage_key" -type f ! -name '*.pyc' -printf . 2>/dev/null | wc -c)
  [ "$count" -ge "$stage_files" ]
}

# Sets stage_why where the disk has not so many bytes, a tenth more, or too few names for files.
has_room() {
  local need=$(($1 * 11 / 10240 + 1)) files=$((stage_files * 11 / 10)) free all names
  { read -r _ && read -r _ _ _ free _; } < <(df -Pk -- "$stage_root")
  { read -r _ && read -r _ all _ names _; } < <(df -Pi -- "$stage_root")
  stage_why=''
  if [ "${free:-0}" -lt "$need" ]; then
    stage_why="no room in $stage_root: $((need / 1024)) MiB needed, $((${free:-0} / 1024)) MiB free"
  elif [ "${all:-0}" != 0 ] && [[ $names =~ ^[0-9]+$ ]] && [ "$names" -lt "$files" ]; then
    stage_why="no room in $stage_root: $files files needed, $names free"
  fi
  [ -z "$stage_why" ]
}

# Environments that nobody runs from go, the longest unused first, until there is room; not the one
# whose lock this process has.
make_room() {
  local lock key
  has_room "$1" && return
  while read -r lock; do
    key=${lock##*/} key=${key%.lock}
    exec 8>>"$lock"
    if flock -n -x 8; then
      remove "$key"
      rm -rf -- "${stage_root:?}/$key.new"
    fi
    exec 8>&-
    has_room "$1" && return
  done < <(ls -1tr -- "$stage_root"/*.lock 2>/dev/null)
  has_room "$1"
}

# Nobody is to find half of it.
remove() {
  local old=$stage_root/.old-$1-$$
  mv -T -- "$stage_root/$1" "$old" 2>/dev/null
  rm -rf -- "$stage_root/.old-$1-"*
}

missing_tool() {
  local tool tools=(tar flock sha256sum timeout tee find df stat mkfifo)
  [ "$stage_compress" = none ] || tools+=("$stage_compress")
  for tool in "${tools[@]}"; do
    command -v "$tool" >/dev/null || { printf %s "$tool"; return; }
  done
}

plain() {
  case $stage_compress in
    zstd) zstd -dcq ;;
    *) cat ;;
  esac
}

# Unpacks what stage_source names into a folder, and reads it once, for its digest too.
unpack() {
  local new=$1 left=$2 sum said status
  if ! mkdir -- "$new" || ! mkfifo "$new/.bytes"; then
    stage_why="$new cannot be made"
    return 1
  fi
  exec 7< <(exec sha256sum <"$new/.bytes")
  # What is said stays in memory: the disk may be full.
  said=$(
    {
      timeout "$left" cat -- "$stage_source" | tee "$new/.bytes" | plain |
        tar -x -C "$new" --no-same-owner --no-same-permissions -f -
      printf '%s\n' "${PIPESTATUS[*]}"
    } 2>&1
  )
  read -r -a status < <(printf '%s\n' "${said##*$'\n'}")
  said=${said%%$'\n'*}
  read -r sum _ <&7
  exec 7<&-
  rm -f -- "$new/.bytes"
  if [ "${status[0]}" = 124 ]; then
    stage_why="$stage_source was not read in time"
  elif [ "${status[0]}" != 0 ] && [ "${status[0]}" != 141 ]; then
    stage_why="$stage_source cannot be read: $said"
  elif [ "${status[0]}" = 0 ] && [ "$sum" != "$stage_sha256" ]; then
    stage_why="$stage_source is torn: its digest is another"
  elif [ "${status[0]}${status[2]}${status[3]}" != 000 ]; then # 141: who reads has gone before
    stage_why="$stage_source cannot be unpacked: $said"
  fi
  [ -z "$stage_why" ]
}

# A venv says where its own interpreter lies.
write_home() {
  local at=$1 home=$2 line text=''
  [ -d "$at/base" ] && [ -f "$at/env/pyvenv.cfg" ] || return 0
  while IFS= read -r line || [ -n "$line" ]; do
    [[ $line =~ ^home[[:space:]]*= ]] && line="home = $home/base/bin"
    text+=$line$'\n'
  done <"$at/env/pyvenv.cfg"
  printf %s "$text" >"$at/env/pyvenv.cfg"
}

# A folder may forbid to run what lies in it, a library may be missing on this node.
can_start() {
  local at=$1 said
  write_home "$at" "$at"
  said=$(timeout 60 "$at/env/$stage_python" -I -c 'import sys; print(sys.prefix)' 2>&1)
  [ "$said" = "$at/env" ] && return
  stage_why="its python does not start from $stage_root: ${said%%$'\n'*}"
  return 1
}

look() {
  local tool
  tool=$(missing_tool)
  [ -z "$tool" ] || no "$tool is not on the PATH"
  find_root || no "$stage_why"
  if is_whole; then
    say have
  elif has_room "$((stage_bytes + stage_unpacked))"; then
    say need "$stage_root"
  else
    say full "$stage_why"
  fi
}

# Sets nothing; comes back with the key's lock held alone, or ends as one that has waited enough.
lock_alone() {
  local tries left began=$1
  for tries in {1..20}; do
    left=$((stage_timeout - SECONDS + began))
    flock -s -w "$((left > 0 ? left : 0))" 9 ||
      no "another job was unpacking it for $stage_timeout s"
    reuse
    flock -u 9
    if flock -n -x 9; then
      reuse
      return
    fi
    sleep "0.$((RANDOM % 9 + 1))" # whoever looks at the same time
  done
  no "$stage_root/$stage_key lacks files, and is in use ($tries tries)"
}

reuse() {
  is_whole || return
  touch -- "$stage_root/$stage_key.lock"
  say reused "$stage_root"
  exit 0
}

get() {
  local tool left new began=$SECONDS
  umask 077
  tool=$(missing_tool)
  [ -z "$tool" ] || no "$tool is not on the PATH"
  find_root || no "$stage_why"
  stage_source=${stage_sent:-$stage_archive}
  trap 'rm -f -- "$stage_root/$stage_key.sent-${SLURM_JOB_ID:-0}"' EXIT
  exec 9>>"$stage_root/$stage_key.lock" || no "$stage_root/$stage_key.lock cannot be opened"
  lock_alone "$began"
  remove "$stage_key" # it lacks files, and nobody runs from it
  new=$stage_root/$stage_key.new
  rm -rf -- "$new"
  make_room "$stage_unpacked" || no "$stage_why"
  left=$((stage_timeout - SECONDS + began))
  if unpack "$new" "$((left > 0 ? left : 1))" && can_start "$new"; then
    write_home "$new" "$stage_root/$stage_key"
    if mv -T -- "$new" "$stage_root/$stage_key"; then
      say staged "$stage_root"
      exit 0
    fi
    stage_why="it cannot be renamed in $stage_root"
  fi
  rm -rf -- "$new"
  no "$stage_why"
}

# Held by the agent and the ranks that it forks, to their end: nobody removes what they run from.
run_from() {
  local staged
  if find_root && staged=$stage_root/$stage_key/env && [ -x "$staged/$stage_python" ] &&
    exec 9<"$stage_root/$stage_key.lock" && flock -s -w 10 9 && [ -x "$staged/$stage_python" ]; then
    shift
    set -- "$staged/$stage_python" "$@"
    PATH=:$PATH:
    PATH=${PATH//":$stage_prefix/bin:"/":$staged/bin:"}
    PATH=${PATH#:} PATH=${PATH%:}
    [ "${VIRTUAL_ENV:-}" != "$stage_prefix" ] || export VIRTUAL_ENV=$staged
    [ "${CONDA_PREFIX:-}" != "$stage_prefix" ] || export CONDA_PREFIX=$staged
  else
    exec 9<&-
    echo "hpctrain: ${SLURMD_NODENAME:-this node} starts from the shared environment" >&2
  fi
  exec "$@"
}

case $stage_verb in
  look) look ;;
  get) get ;;
  run) run_from "$@" ;;
esac
