"""Every setting that there is, with its meaning, unit and default.

Adding a field here is all it takes: merging, refusing of unknown keys, its rule, `--set`, and the
reference page are derived from these classes. Numbers are at least 0 where nothing else is said.
Standard library only, and no reading of files: `layers.py` has that.
tests/unit/settings/test_layers.py and test_check.py hold the promises.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hpctrain.core.settings.fields import WORD, Table, field, keys_of, table

if TYPE_CHECKING:
    from collections.abc import Mapping

CHANGES = ("new-parameters", "dropped-parameters", "optimizer-changed")
"""Changes of a program that `resume.allow` lets pass; `runtime.fitting` decides what each means."""

REMOVED = {
    "alive.grow": "no node is added to a job that runs; a requeue brings back all nodes",
    "alive.last_will": "a killed rank costs the steps since the last copy (alive.memory_steps)",
    "checkpoint.overlap_copy": "training waits for the copy of each save into host memory",
    "checkpoint.read_once": "what several ranks hold is read once and broadcast",
    "checkpoint.save_patience_s": "checkpoint.patience_s holds for saves too",
    "checkpoint.stripe_count": "`lfs setstripe` for the run's folder of checkpoints does the same",
    "checkpoint.stripe_mib": "`lfs setstripe` for the run's folder of checkpoints does the same",
    "checkpoint.when_busy": "a save that is due waits for the one before",
    "checkpoint.write_mib": "4 MiB are handed to the file system at a time",
    "engine.async_tp": "products and their exchange over tp follow each other",
    "engine.ds_config": "zero0 to zero3 are configured by [engine] alone",
    "engine.float8": "matrices are multiplied in engine.precision",
    "engine.nvme_path": "no state goes to a disk of the node; engine.offload takes no or cpu",
    "environment.compress": "zstd packs where it is installed, else nothing is compressed",
    "environment.stage_timeout_s": "a node that takes over ten minutes starts from the shared files",
    "guard.audit": "gradients are computed once; guard.replicas compares weights",
    "guard.disputed": "gradients are computed once; guard.diverged is about weights that differ",
    "preflight.bad_node_hours": "a bad node is kept out of the run for 24 hours",
    "preflight.bandwidth_hours": "nodes that were fast together are not tried again for 12 hours",
    "preflight.timeout_s": "an attempt continues after 120 seconds without an answer",
    "profile.nsys_rank": "profile.steps traces; nsys can be started by the program itself",
    "train.data_glob": "the recipe reads *.py, *.txt and *.md",
    "train.val_batches": "the recipe validates on 4 global batches",
    "train.val_every": "the recipe validates at its end; evaluate.script does it between",
}
"""Keys that were settings, and what holds now; a spec.json may still have them."""

RENAMED = {"alive.memory_buddy": "alive.memory_peer"}
"""Old names of settings, which are read and never written."""

setting = partial(field, free=True)


class SlurmSettings(Table):
    """[slurm]: options for the scheduler."""

    nodes: str = setting("1", "nodes: N, or MIN-MAX to use the free ones at each (re)start")
    gpus_per_node: int = setting(0, "GPUs per node; 0 for none")
    gpu_type: str = setting(
        "", "their type in SLURM's spelling, e.g. a100; empty: any", pattern=WORD
    )
    ranks_per_node: int = setting(0, "ranks per node; 0 means one per GPU, or one without GPUs")
    time: str = setting(
        "1:00:00",
        "time limit of one job: [days-]hours:minutes:seconds, minutes, or with units: 12h, 1d12h",
    )
    partition: str = setting(
        "", "partition(s), comma-separated; empty for the cluster's default", pattern=WORD
    )
    account: str = setting("", "account to charge", pattern=WORD)
    qos: str = setting("", "quality of service", pattern=WORD)
    constraint: str = setting("", "node features", pattern=WORD)
    reservation: str = setting("", "reservation", pattern=WORD)
    exclude: str = setting("", "nodes to avoid", pattern=WORD)
    mem: str = setting("", "memory per node, SLURM's form, e.g. 64G; 0 for all of it", pattern=WORD)
    cpus_per_rank: int = setting(0, "CPU cores per rank; 0: as exclusive nodes or the site decide")
    exclusive: str = setting(
        "auto",
        "whole nodes: auto means yes for jobs without GPUs",
        choices=("auto", "yes", "no"),
    )
    signal_lead_s: int = setting(90, "seconds before the time limit at which SLURM warns (SIGUSR2)")
    extra: list[str] = setting([], "more sbatch options, one string each, e.g. --switches=1")
    srun_args: list[str] = setting([], "more srun options, one string each")
    setup: list[str] = setting(
        [], "shell lines that run on the first node before srun (module load ...)"
    )
    setup_may_fail: bool = setting(
        False, "continue after a failed line of setup; false: end the start and name the line"
    )
    network: str = setting("", "SLURM's --network", pattern=WORD)

    def gpus_text(self, kind: str = "") -> str:
        """GPUs of a node as sbatch is asked for them: N or TYPE:N."""
        typed = self.gpu_type or kind
        return f"{typed}:{self.gpus_per_node}" if typed else str(self.gpus_per_node)

    def ranks(self) -> int:
        """Ranks on each node: as set, else one per GPU, else one."""
        return self.ranks_per_node or self.gpus_per_node or 1


class ShapeSettings(Table):
    """[shape]: nodes and time limit that hpctrain chooses itself, at submit and at each requeue."""

    choose: str = setting(
        "no",
        "SLURM: what is chosen, so that the run is done soon: nodes (within slurm.nodes MIN-MAX), "
        "time, or both; `--time auto` and `--nodes auto` set it",
        choices=("no", "nodes", "time", "both"),
    )
    prefer: str = setting(
        "time",
        "what counts: time is the earliest finish, cost the fewest node-hours, balanced the "
        "earliest finish for at most 10 % more than the fewest node-hours",
        choices=("time", "cost", "balanced"),
    )
    max_node_hours: float = setting(
        0.0, "shapes are refused with which the whole run would take more; 0: no limit"
    )


class ContainerSettings(Table):
    """[container]: the image for agents and ranks; the batch script stays outside."""

    image: str = setting(
        "",
        "path of an image on every node, a registry's reference, or for cscs-ce the path or "
        "name of an EDF; empty: no container",
    )
    runtime: str = setting(
        "",
        "what starts the container; empty: the site preset's container.runtime",
        choices=(
            "",
            "apptainer",
            "singularity",
            "enroot-pyxis",
            "shifter",
            "podman-hpc",
            "podman",
            "charliecloud",
            "cscs-ce",
        ),
    )
    mounts: list[str] = setting(
        [],
        "folders or files of the host to mount, SRC[:DST[:ro]]; the run's own folders are "
        "mounted already",
    )
    env: list[str] = setting(
        [],
        "variables for the inside: NAME=VALUE, or NAME for the batch script's value, which then "
        "wins over the image's",
    )
    python: str = setting("python3", "the interpreter in the image that has hpctrain and torch")
    options: list[str] = setting(
        [], "more words for the runtime's command, or for srun if srun starts the container"
    )


class RunSettings(Table):
    """[run]: restarts, stops and the run's folder."""

    start_method: str = setting(
        "fork",
        "how ranks start: fork imports torch once per node; spawn is the alternative",
        choices=("fork", "spawn"),
    )
    stop_margin_s: float = setting(10.0, "seconds between a finished save and the end of the job")
    restarts_in_job: int = setting(
        3, "restarts of crashed ranks inside one job before the job is requeued"
    )
    restart_pause_s: float = setting(
        60.0,
        "longest pause before crashed ranks restart inside one job: none at first, 1 s after a "
        "second crash of the same cause, then twice as long each time; 0: none",
    )
    end_wait_s: float = setting(
        300.0,
        "seconds without output, computing, reading or writing after which hpctrain ends the "
        "remaining ranks, once some ranks have returned; 0: never",
    )
    snapshot: str = setting(
        "auto",
        "copy the git-tracked files at submit: auto means yes below 64 MB",
        choices=("auto", "yes", "no"),
    )
    lint: bool = setting(
        True, "submit prints lint's findings in the program, and submits it anyway"
    )
    cpu_bind: str = setting(
        "auto",
        "SLURM: bind ranks to the CPUs near their GPU, among those of the job; auto means ranks "
        "with GPUs, yes all ranks",
        choices=("auto", "yes", "no"),
    )
    log_every_s: float = setting(5.0, "seconds between step marks in the ledger")
    resume_args: str = setting(
        "",
        "arguments added to the program's own if a checkpoint exists, e.g. --init_from=resume; "
        "{checkpoint} is its newest registered checkpoint, {step} the number at the end of its "
        "name",
    )
    resume_if: str = setting(
        "",
        "add resume_args if files match, e.g. out/*.pt (relative to the working directory); "
        "empty: from the second start on, or if a registered checkpoint exists",
    )
    group_writable: bool = setting(
        False,
        "the run's group may write into it; false: only the owner may, whatever the umask",
    )


AUTO_STAGE_NODES = 8


class EnvironmentSettings(Table):
    """[environment]: a copy of the Python environment on each node."""

    stage: str = setting(
        "no",
        "SLURM: each node starts from a copy on its own disk or in its memory; auto means jobs that "
        f"may have {AUTO_STAGE_NODES} nodes or more",
        choices=("no", "auto", "yes"),
    )
    stage_dir: str = setting(
        "",
        "the node's folder for the copy, with $VARIABLES of the node; empty: the first existing "
        "one of $SLURM_TMPDIR, the site's storage.local, $TMPDIR and /tmp",
    )

    def is_staged(self, most_nodes: int) -> bool:
        """Whether a job is to be staged, by the most nodes that it may have."""
        return self.stage == "yes" or (self.stage == "auto" and most_nodes >= AUTO_STAGE_NODES)


class PreflightSettings(Table):
    """[preflight]: checks of the nodes before ranks start."""

    enabled: str = setting(
        "auto",
        "check nodes before ranks start: auto means SLURM jobs of several nodes",
        choices=("auto", "yes", "no"),
    )
    bandwidth: str = setting(
        "auto",
        "also try their all-reduce: auto means if the site's preset has a [baseline]",
        choices=("auto", "yes", "no"),
    )


class AliveSettings(Table):
    """[alive]: hangs, slow ranks and lost nodes."""

    hang: str = setting(
        "restart",
        "if ranks hang: restart names the ranks that block the others and restarts all; tell "
        "only names them; off does neither",
        choices=("restart", "tell", "off"),
    )
    hang_s: float = setting(
        0.0,
        "time a rank may stay in one phase before it counts as hung: the larger of this value "
        "and five times the longest phase so far; 0 means 60 s",
    )
    desync: str = setting(
        "tell",
        "if ranks call different numbers of collectives: tell names them; restart also restarts "
        "the ranks; off does neither",
        choices=("restart", "tell", "off"),
    )
    stragglers: str = setting(
        "tell",
        "if a rank, a node or its data slow the others at every step: tell names them",
        choices=("tell", "off"),
    )
    first_step_s: float = setting(
        1800.0, "seconds for everything before the end of the first step", above=0
    )
    spares: int = setting(
        0,
        "SLURM: additional nodes that wait to replace a lost one; `--nodes 4+1` sets it too",
        most=1000,
    )
    shrink: str = setting(
        "no",
        "SLURM: if no spare is left, auto: train on the remaining nodes, as far as slurm.nodes "
        "MIN-MAX and the mesh allow; no: requeue the job",
        choices=("no", "auto"),
    )
    lease_s: float = setting(
        10.0,
        "seconds of silence after which a node counts as lost; a node that stood still for so "
        "long ends its own ranks, unless all nodes did",
        least=1,
        most=600,
    )

    memory: str = setting(
        "no",
        "copies of the state in the nodes' memory, from which ranks restarted in the same "
        "allocation resume; no: only checkpoints on disk",
        choices=("auto", "no"),
    )
    memory_steps: int = setting(
        0, "most steps between two such copies; 0 chooses by the cost of a copy"
    )
    memory_peer: str = setting(
        "auto",
        "auto: if the run outlives its nodes (spares, shrink), each copy is also on another "
        "node, on another switch if SLURM reports switches; this doubles the memory; no: one "
        "copy",
        choices=("auto", "no"),
    )

    def is_on(self) -> bool:
        """Whether the run outlives its nodes."""
        return self.spares > 0 or self.shrink == "auto"


class BudgetSettings(Table):
    """[budget]: how often each cause may end an attempt before the run stops for good (0: no limit)."""

    preemptions: int = setting(0, "preemptions and requeues from outside")
    time_limits: int = setting(0, "time limits")
    nodes: int = setting(20, "node failures")
    crashes: int = setting(5, "crashes")
    storage: int = setting(10, "file-system faults")
    no_progress: int = setting(3, "attempts in a row without one new committed step")


OF_EVALUATION = "eval."
"""How the name of an evaluation's metric begins where it stands beside those of the training."""


class CheckpointSettings(Table):
    """[checkpoint]: when to save, how, and what to keep."""

    interval_steps: int = setting(0, "save every N steps; 0: interval_s decides")
    interval_s: float = setting(
        0.0,
        "save every so many seconds; 0 chooses by the cost of a save and the failures so far",
    )
    max_loss_s: float = setting(
        1800.0, "upper limit of the chosen interval: what a hard kill may cost", above=0
    )
    mode: str = setting(
        "async",
        "async writes a copy in host memory while training continues; sync writes while "
        "training waits",
        choices=("async", "sync"),
    )
    timeout_s: float = setting(
        1800.0, "a background save that takes longer has failed; training continues", above=0
    )
    patience_s: float = setting(
        120.0,
        "how long reads, and the last save before the exit, are retried after errors of the "
        "file system; a save at most as long as the scheduler allows",
        most=300,
    )
    # Past these, one save takes the threads of a whole node; past `patience_s`, ranks
    # that wait for one that waits for its file system end by their collective's time-out.
    write_threads: int = setting(1, "threads of each rank that write its shard", least=1, most=64)
    keep_last: int = setting(
        3, "newest checkpoints to keep; at least 2, in case one is damaged", least=2
    )
    sealed: list[str] = setting(
        [],
        "checkpoints of the program itself, registered by the agent: names or patterns, "
        "absolute or relative to its working directory and to the run's output folder, e.g. "
        "out/checkpoint-*",
    )
    seal_settle_s: float = setting(
        10.0, "seconds without a change after which such a file or folder is registered"
    )
    keep_sealed: int = setting(
        2, "newest copies to keep of a program's own registered checkpoints", least=1
    )
    keep_every: int = setting(
        0, "also keep every checkpoint whose step is a multiple of this; 0 for none"
    )
    keep_best: int = setting(0, "also keep this number of the best by best_metric; 0 for none")
    best_metric: str = setting(
        "loss", "a name that the program passes to run.log, or eval.NAME of its evaluations"
    )
    best_is: str = setting("lowest", "which value of it is the best", choices=("lowest", "highest"))


class ResumeSettings(Table):
    """[resume]: changes of the program since the checkpoint that may pass."""

    allow: list[str] = setting(
        [],
        "permitted changes of the program: new-parameters (parameters that the checkpoint lacks "
        "keep the program's values), dropped-parameters (those that the program lacks are "
        "ignored), optimizer-changed (the optimizer begins without state)",
        choices=CHANGES,
    )


class EvaluateSettings(Table):
    """[evaluate]: jobs that evaluate checkpoints."""

    script: str = setting(
        "",
        "command line that evaluates a checkpoint, as behind --; empty: no evaluations",
    )
    every: int = setting(
        1, "every n-th new checkpoint, counted over the run's life; 0: only the last"
    )
    last: bool = setting(True, "also the last checkpoint of a finished run")
    at_once: int = setting(1, "evaluations that wait or run at a time", least=1)
    nodes: str = setting("", "nodes of each, N or MIN-MAX; empty: the run's own")
    ranks_per_node: int = setting(
        -1, "ranks per node; 0 means one per GPU, or one without GPUs; -1: the run's own", least=-1
    )
    gpus_per_node: int = setting(-1, "GPUs per node; 0 for none; -1: the run's own", least=-1)
    time: str = setting("", "time limit of each; empty: the run's own")
    partition: str = setting("", "partition(s); empty: the run's own", pattern=WORD)
    qos: str = setting("", "quality of service; empty: the run's own", pattern=WORD)


class ThenSettings(Table):
    """[then]: the allocation of the job for `--then`."""

    nodes: str = setting("1", "nodes, N or MIN-MAX; empty: the run's own")
    ranks_per_node: int = setting(
        1, "ranks per node; 0 means one per GPU, or one without GPUs; -1: the run's own", least=-1
    )
    gpus_per_node: int = setting(-1, "GPUs per node; 0 for none; -1: the run's own", least=-1)
    time: str = setting("", "time limit; empty: the run's own")
    partition: str = setting("", "partition(s); empty: the run's own", pattern=WORD)
    qos: str = setting("", "quality of service; empty: the run's own", pattern=WORD)


class NotifySettings(Table):
    """[notify]: messages about a run; they never block training."""

    command: str = setting(
        "",
        "command line that receives the news as JSON on its standard input; runs without a shell",
    )
    webhook_file: str = setting(
        "",
        "file with the URL that receives the news as JSON; a file, because the URL is a secret",
    )
    plain_http: bool = setting(
        False, "also accept an http:// URL, which others on the way can read"
    )
    on: list[str] = setting(
        ["done", "failed", "stopped"],
        "which news: done, failed (also a job that could not be requeued), stopped (a budget, "
        "no progress, a cancel), attempt (the end of each), incident (a hang, a lost node, slow "
        "ranks)",
    )
    timeout_s: float = setting(30.0, "seconds after which a notification is abandoned", least=1)


class TrackSettings(Table):
    """[track]: experiment trackers beside TensorBoard."""

    loggers: list[str] = setting([], "wandb, or module:name of your own (`hpctrain help watching`)")
    project: str = setting("hpctrain", "the tracker's project for the run")


class ProfileSettings(Table):
    """[profile]: traces of some steps of some ranks."""

    steps: str = setting("", "FIRST:LAST step to profile, both inclusive; empty for none")
    ranks: str = setting("0", "ranks to profile: R, R,R or all")
    memory: bool = setting(False, "also record allocations of GPU memory")


class EngineSettings(Table):
    """[engine]: how the model is parallelised."""

    kind: str = setting(
        "ddp",
        "ddp copies the model, fsdp2 shards it (and is the base of tp, pp and ep), zero0 to "
        "zero3 are DeepSpeed's stages",
        choices=("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"),
    )
    tp: str = setting("1", "tensor-parallel ranks: N, or MIN-MAX to fit the nodes; in a node")
    pp: str = setting("1", "pipeline-parallel ranks: N or MIN-MAX; across nodes")
    ep: str = setting("1", "expert-parallel ranks: N or MIN-MAX; part of the data-parallel ones")
    cp: str = setting(
        "1",
        "context-parallel ranks, which share each sequence: N or MIN-MAX; part of the "
        "data-parallel ones, without tp, pp and ep",
    )
    dp_replicate: str = setting(
        "1", "fsdp2: copies of the sharded model (hybrid sharding): N or MIN-MAX"
    )
    sequence_parallel: bool = setting(
        True, "tp: norms and dropout work on a part of the sequence each"
    )
    pp_schedule: str = setting(
        "1f1b",
        "pp: order of the microbatches",
        choices=("gpipe", "1f1b", "interleaved", "zero_bubble"),
    )
    pp_stages_per_rank: int = setting(
        2, "pp_schedule interleaved, zero_bubble: pieces of the model on each rank", least=1
    )
    precision: str = setting(
        "auto",
        "auto is bf16 on a GPU that has it, otherwise fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    clip_norm: float = setting(1.0, "gradient norm is clipped to this; 0 for no clipping")
    activation_checkpointing: str = setting(
        "no",
        "recompute in the backward pass: full recomputes each block, selective all but matrix "
        "products",
        choices=("no", "full", "selective"),
    )
    compile: str = setting(
        "no",
        "torch.compile each block, with this backend",
        choices=("no", "inductor", "aot_eager", "eager"),
    )
    reshard_after_forward: bool = setting(
        True, "fsdp2: free a block's gathered parameters after its forward pass"
    )
    reduce_each_pass: bool = setting(
        False,
        "fsdp2: reduce gradients in each pass of a step; GPUs hold only shards of them between "
        "passes, and send more",
    )
    offload: str = setting(
        "no",
        "where optimizer state and masters are: no is the device; cpu is for fsdp2 and zero1 to "
        "zero3",
        choices=("no", "cpu"),
    )
    pretrained: str = setting(
        "",
        "a Hugging Face folder: `run.parallelize` begins with its weights, and submit checks "
        "its config.json",
    )
    exact: bool = setting(
        False,
        "ddp and fsdp2: the same bits at any number of data-parallel ranks; needs train.micro_batch",
    )


class GuardSettings(Table):
    """[guard]: steps whose numbers are wrong."""

    nonfinite: str = setting(
        "skip",
        "a loss or gradient norm that is NaN or infinite is computed again; if it stays so, "
        "skip skips the update and ends the run after 3 in a row or more than 3 in 100 steps, "
        "rewind rewinds before it ends the run, stop ends the run at the first, tell only "
        "reports, off does nothing",
        choices=("skip", "rewind", "stop", "tell", "off"),
    )
    spike: str = setting(
        "tell",
        "a loss or gradient norm 10 deviations above the median of the last 128: tell reports "
        "it, skip also skips the update, rewind resumes from a checkpoint of 20 steps before "
        "and skips the samples since then, off does nothing",
        choices=("tell", "skip", "rewind", "off"),
    )
    replicas: int = setting(
        8,
        "compare replicas of weights between ranks, one of so many slices at each step; 0: never",
        most=1000,
    )
    diverged: str = setting(
        "rewind",
        "if replicas differ: rewind restarts the ranks from a checkpoint before the difference, "
        "stop ends the run, tell only reports",
        choices=("rewind", "stop", "tell"),
    )
    convict: int = setting(
        2,
        "exclude a node after guards have named it this often, for preflight.bad_node_hours; 0: "
        "never",
    )


class TrainSettings(Table):
    """[train]: the shipped recipe, a decoder language model on bytes of text files."""

    steps: int = setting(200, "optimizer steps", least=1)
    global_batch: int = setting(
        32, "sequences per step over all ranks; the same at any number of ranks", least=1
    )
    micro_batch: int = setting(
        0, "sequences per forward pass of one rank; 0: the rank's whole share"
    )
    seq_len: int = setting(128, "bytes per sequence", least=1)
    data: str = setting(
        "", "folder of text files; empty for the Python standard library's own source"
    )
    data_limit_mb: float = setting(8.0, "most megabytes of text; 0 for all")
    layers: int = setting(4, "transformer blocks", least=1)
    dim: int = setting(128, "model width", least=1)
    heads: int = setting(4, "attention heads", least=1)
    lr: float = setting(1e-3, "peak learning rate of AdamW")
    warmup: int = setting(20, "warm-up steps")
    weight_decay: float = setting(0.1, "AdamW's weight decay")
    dropout: float = setting(0.0, "dropout probability")
    experts: int = setting(0, "experts in each block's MLP; 0 for a dense one")
    experts_per_token: int = setting(2, "experts that each token goes to", least=1)
    seed: int = setting(1234, "seed of weights, sample order and dropout")
    audit: bool = setting(False, "write every consumed sample's index, to prove exactly-once")
    step_delay_s: float = setting(0.0, "sleep in each step, to rehearse with a tiny model")


class Settings(Table):
    """All sections."""

    slurm: SlurmSettings = table(SlurmSettings)
    shape: ShapeSettings = table(ShapeSettings)
    container: ContainerSettings = table(ContainerSettings)
    run: RunSettings = table(RunSettings)
    environment: EnvironmentSettings = table(EnvironmentSettings)
    preflight: PreflightSettings = table(PreflightSettings)
    alive: AliveSettings = table(AliveSettings)
    budget: BudgetSettings = table(BudgetSettings)
    checkpoint: CheckpointSettings = table(CheckpointSettings)
    resume: ResumeSettings = table(ResumeSettings)
    evaluate: EvaluateSettings = table(EvaluateSettings)
    then: ThenSettings = table(ThenSettings)
    notify: NotifySettings = table(NotifySettings)
    track: TrackSettings = table(TrackSettings)
    profile: ProfileSettings = table(ProfileSettings)
    engine: EngineSettings = table(EngineSettings)
    guard: GuardSettings = table(GuardSettings)
    train: TrainSettings = table(TrainSettings)


def sections() -> dict[str, type]:
    """Section name to its class, in the order in which they are shown."""
    return {name: key.inner for name, key in keys_of(Settings).items() if key.inner}


def current_name(section: str, key: str) -> str:
    """Return the key by which the section has the setting today."""
    return RENAMED.get(f"{section}.{key}", key).rpartition(".")[2]


def replaced(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with other values, by "section.key"; each must be of its setting's type."""
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, value in values.items():
        section, _, key = path.partition(".")
        changes[section][key] = value
    parts = {name: replace(getattr(settings, name), **keys) for name, keys in changes.items()}
    return replace(settings, **parts)


def value_at(settings: Settings, path: str) -> Any:
    """A setting's value by "section.key"."""
    section, _, key = path.partition(".")
    return getattr(getattr(settings, section), key)
