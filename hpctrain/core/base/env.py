"""Environment variables by which processes of ours speak to each other, and users to them.

Each is named here and nowhere else in Python; shell scripts (sbatch/) write the names out.
docs/getting-started.md lists those for users' programs. tests/docs/test_environment.py and
test_environment_page.py hold that.
"""

from __future__ import annotations

HPCTRAIN_AFTER = "HPCTRAIN_AFTER"
"""Directory of the run after which this one runs; several with colons between.
Set by agents; read by users' programs."""
HPCTRAIN_ALIVE = "HPCTRAIN_ALIVE"
"""Whether the job outlives its nodes: 1 or nothing. Set by the batch script; read by agents."""
HPCTRAIN_ATTEMPT = "HPCTRAIN_ATTEMPT"
"""The attempt with its fence, as JSON. Set by agents; read by ranks."""
HPCTRAIN_ATTEMPT_DIR = "HPCTRAIN_ATTEMPT_DIR"
"""Folder of the attempt's logs. Set by agents; read by ranks."""
HPCTRAIN_BATCH_STARTED = "HPCTRAIN_BATCH_STARTED"
"""When the batch script began, in seconds since the epoch.
Set by the batch script; read by agents."""
HPCTRAIN_CHECKPOINT = "HPCTRAIN_CHECKPOINT"
"""Folder of the checkpoint that is to be evaluated. Set by agents; read by users' programs."""
HPCTRAIN_BATCH_VERSION = "HPCTRAIN_BATCH_VERSION"
"""Version of hpctrain outside of containers. Set by the batch script; read by agents."""
HPCTRAIN_CLUSTER = "HPCTRAIN_CLUSTER"
"""Which scheduler there is: slurm or local. Set by agents; read by ranks."""
HPCTRAIN_CONTROL = "HPCTRAIN_CONTROL"
"""Folder on this node in which the ranks reach the process that carries their agreement.
Set by agents; read by ranks."""
HPCTRAIN_GENERATION = "HPCTRAIN_GENERATION"
"""The agents that continue after the first node was lost, as JSON.
Set by agents; read by agents."""
HPCTRAIN_JOB_END = "HPCTRAIN_JOB_END"
"""When the job ends, in seconds since the epoch.
Set by the batch script and agents; read by agents and ranks."""
HPCTRAIN_JOB_ID = "HPCTRAIN_JOB_ID"
"""The job's number. Set by agents; read by users' programs."""
HPCTRAIN_JOB_START = "HPCTRAIN_JOB_START"
"""When this start of the job began, in seconds since the epoch.
Set by the batch script; read by agents."""
HPCTRAIN_REPLICA_SERVER = "HPCTRAIN_REPLICA_SERVER"
"""The process with copies of the state that an agent takes over from the one before it.
Set by agents; read by agents."""
HPCTRAIN_KILL_WAIT_S = "HPCTRAIN_KILL_WAIT_S"
"""Seconds from SIGTERM to SIGKILL.
Set by the batch script and agents; read by agents, ranks and the batch side."""
HPCTRAIN_LOCAL_CONTEXT = "HPCTRAIN_LOCAL_CONTEXT"
"""A node's place in its job, as JSON. Set by the local controller; read by local nodes."""
HPCTRAIN_MASTER_ADDR = "HPCTRAIN_MASTER_ADDR"
"""Address of the first node. Set by the batch script; read by agents and preflights."""
HPCTRAIN_NODE = "HPCTRAIN_NODE"
"""Name of this node. Set by agents; read by ranks."""
HPCTRAIN_NODES = "HPCTRAIN_NODES"
"""Names of the job's nodes in order, as SLURM writes a list of them: `n[1-3,7]`.
Set by the batch script; read by preflights."""
HPCTRAIN_OUTPUT_DIR = "HPCTRAIN_OUTPUT_DIR"
"""Folder of the run's own for what the program writes. Set by agents; read by users' programs."""
HPCTRAIN_PORT = "HPCTRAIN_PORT"
"""Port at which the nodes meet. Set by the batch script; read by agents and preflights."""
HPCTRAIN_PREFLIGHT_KEY = "HPCTRAIN_PREFLIGHT_KEY"
"""Secret by which the nodes of a preflight know each other.
Set by the batch script; read by preflights."""
HPCTRAIN_PYTHON = "HPCTRAIN_PYTHON"
"""The interpreter of the run.
Set by submit, or in a batch file of one's own; read by the batch script."""
HPCTRAIN_RELAY = "HPCTRAIN_RELAY"
"""File with the port of the process that asks SLURM for an agent inside a container.
Set by the batch script; read by agents and that process."""
HPCTRAIN_RESTARTS = "HPCTRAIN_RESTARTS"
"""How often the job was restarted. Set by the batch script and agents; read by users' programs."""
HPCTRAIN_RESULTS = "HPCTRAIN_RESULTS"
"""Where an evaluation writes its metrics, as JSON. Set by agents; read by users' programs."""
HPCTRAIN_RESUME = "HPCTRAIN_RESUME"
"""Path of the program's newest complete registered checkpoint; unset without one.
Set by agents; read by ranks and users' programs."""
HPCTRAIN_RESUME_ARGS = "HPCTRAIN_RESUME_ARGS"
"""Arguments that are added to the program's own at this start, as JSON.
Set by agents; read by ranks."""
HPCTRAIN_RUN_DIR = "HPCTRAIN_RUN_DIR"
"""The run's directory.
Set by submit and agents; read by the batch script, ranks and users' programs."""
HPCTRAIN_STARTS = "HPCTRAIN_STARTS"
"""How often the run's ranks were started, over all its jobs: 1 at the first start.
Set by agents; read by users' programs."""
HPCTRAIN_STOP_FILE = "HPCTRAIN_STOP_FILE"
"""Path of a file on this node that is there as soon as the ranks should leave.
Set by agents; read by ranks and users' programs."""
HPCTRAIN_TOKEN = "HPCTRAIN_TOKEN"  # noqa: S105 - a name
"""By which a submission is known. Set by submit; read by the batch script and agents."""

OF_ONE_JOB = frozenset(name for name in tuple(globals()) if name.startswith("HPCTRAIN_"))
"""All above: true for one job, so a `submit` from inside it drops them."""

HPCTRAIN_FAULTS = "HPCTRAIN_FAULTS"
"""Faults to put into saves and restores. Set by users; read by every process."""
HPCTRAIN_LOCAL_DIR = "HPCTRAIN_LOCAL_DIR"
"""Where local jobs live. Set by users; read by the local cluster."""
HPCTRAIN_LOG_LEVEL = "HPCTRAIN_LOG_LEVEL"
"""From which level on we log: DEBUG, INFO, WARNING, ERROR or CRITICAL.
Set by users; read by every process."""
HPCTRAIN_NET_PLUGIN_VERSION = "HPCTRAIN_NET_PLUGIN_VERSION"
"""Version of NCCL's network plugin, which torch cannot be asked.
Set by a site's modules or setup; read by agents."""
HPCTRAIN_NODE_FAULTS = "HPCTRAIN_NODE_FAULTS"
"""What a preflight is to see that is not there. Set by users; read by preflights."""
HPCTRAIN_NOTIFY = "HPCTRAIN_NOTIFY_"
"""Beginning of each fact's name, for `notify.command`.
Set by the notification's process; read by the user's command."""
HPCTRAIN_RUNS = "HPCTRAIN_RUNS"
"""The folder of all runs. Set by users; read by all commands."""
HPCTRAIN_SITE = "HPCTRAIN_SITE"
"""The cluster's preset. Set by users; read by submit."""
HPCTRAIN_SITE_PATH = "HPCTRAIN_SITE_PATH"
"""Folders of presets, with colons. Set by users; read by all commands that know sites."""
