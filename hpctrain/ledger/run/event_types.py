"""The kinds of event that a ledger holds: a frozen, slotted dataclass for each.

A field's range, its unit and its meaning stand beside it; docs/development/ledger.md is written
from here (`make settings`). A field that was not written is None; where None would say no more than
nothing does, it is "", () or False. tests/unit/run/test_event_fields.py and
test_untrusted_ledgers.py hold the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.core.base.records import EndReason, Next, Skipped, StopCause
from hpctrain.ledger.run import event_fields as check
from hpctrain.ledger.run.event_fields import LedgerFact, event, maybe, needed

if TYPE_CHECKING:
    from collections.abc import Mapping


@event("submit_intent", by="the login node")
class SubmitIntent(LedgerFact):
    """The scheduler is about to be asked for a job."""

    token: str = needed(check.identifier, "names this submission, as its script and its job do")
    script: str = maybe(check.path, "the batch script")
    slurm_cluster: str = maybe(check.words, "SLURM's ClusterName")


@event("submitted", by="the login node")
class Submitted(LedgerFact):
    """The scheduler has accepted the job."""

    token: str = needed(check.identifier, "that of the intent")
    job_id: str = needed(check.identifier, "the job")
    cluster: str = maybe(check.words, "`slurm` or `local`")
    nodes: str = maybe(check.words, "nodes that were asked for, as `2` or `2-4`")
    by: str = maybe(check.words, "`submit` or `resume`")
    from_step: int | None = maybe(check.count, "the checkpoint that `resume --from` named")
    total_steps: int | None = maybe(check.count, "steps that the recipe trains for in all")
    changed: str | None = maybe(check.words, "code or program of a resume that did not run before")


@event("shape_chosen", by="the login node; the batch side before a requeue's start")
class ShapeChosen(LedgerFact):
    """The nodes and the time limit of the run's next job were chosen among candidates."""

    by: str = maybe(check.words, "`submit`, `resume` or `requeue`")
    nodes: int | None = maybe(check.count, "that train in it; spares come on top")
    limit_s: float | None = maybe(check.seconds, "its time limit")
    wait_s: float | None = maybe(check.seconds, "that it was expected to wait")
    estimate_s: float | None = maybe(check.seconds, "that the scheduler had estimated")
    partition: str = maybe(check.words, "where; empty for the default one")
    kept: bool = maybe(check.flag, "the shape is the one that the run had")
    why: tuple[str, ...] = maybe(check.texts, "the reasons, in two lines")
    failed: str = maybe(check.words, "why the job could not get this shape and keeps its own")
    candidates: tuple[Mapping[str, Any], ...] = maybe(
        check.mappings, "all that were looked at, each with its forecast, and why it was refused"
    )


@event("submit_adopted", by="the login node")
class SubmitAdopted(LedgerFact):
    """A submission that got no answer was found to have become a job."""

    token: str = needed(check.identifier, "that of the intent")
    job_id: str = needed(check.identifier, "the job")


@event("submit_failed", by="the login node")
class SubmitFailed(LedgerFact):
    """The scheduler has refused the job, or `cancel` gave up a submission without an answer."""

    token: str = maybe(check.identifier, "that of the intent")
    why: str = maybe(check.words, "what it said")


@event("followed", by="the login node")
class Followed(LedgerFact):
    """Another run is to run after this one."""

    run: str = needed(check.path, "that run's directory")


@event("held_back", by="the batch side")
class HeldBack(LedgerFact):
    """A job of the run has ended before its ranks: a run that is to be done first is not."""

    job_id: str = maybe(check.identifier, "the job")
    why: str = maybe(check.words, "which run, where it stands, and what to do")


@event("cancel_requested", by="the login node")
class CancelRequested(LedgerFact):
    """A user wants the job to end; it is not requeued any more."""

    job_id: str = maybe(check.identifier, "the job")
    save: bool = maybe(check.flag, "save first (`cancel --save`)")


@event("attempt_started", by="the agent of node 0; the batch side where none came so far")
class AttemptStarted(LedgerFact):
    """An attempt has its number and may write."""

    job_id: str = maybe(check.identifier, "its job")
    restarts: int | None = maybe(check.count, "how often the scheduler had restarted the job")
    nodes: tuple[str, ...] = maybe(check.texts, "host names, by node rank")
    world_size: int | None = maybe(check.count, "ranks; 0 where none was started")
    ranks_per_node: int | None = maybe(check.count, "ranks on each node")
    spares: tuple[str, ...] = maybe(
        check.texts, "nodes that wait to take a lost one's place: `alive.spares`"
    )
    peers: tuple[str, ...] = maybe(
        check.texts,
        "of each node its replica peer, which has copies of its ranks' state, by node rank",
        was="buddies",
    )
    switches: tuple[str, ...] = maybe(
        check.texts,
        "what each node hangs on by SLURM's topology, by node rank; an empty one is not known",
    )
    run_dir: str = maybe(check.path, "where the run lay then: a copy is known by it")
    slurm_cluster: str = maybe(check.words, "SLURM's ClusterName")
    token: str = maybe(check.identifier, "the attempt's own, by which it holds the fence")
    by: str = maybe(check.words, "`start`, `restart` inside the allocation, or `batch`")
    cpus: tuple[str, ...] = maybe(
        check.texts, "of each rank of the first node, where they are bound"
    )
    job_started: float | None = maybe(check.moment, "the start of the job by the scheduler's word")
    batch_started: float | None = maybe(check.moment, "the start of the batch script")
    agent_started: float | None = maybe(check.moment, "the start of the agent")
    imported: float | None = maybe(check.moment, "when the agent had imported what it needs")


@event("phase", by="rank 0")
class PhaseReached(LedgerFact):
    """The ranks have come so far."""

    name: str = maybe(check.words, "`initialised` or `first_step`")
    device: str = maybe(check.words, "with `initialised`: the accelerator's name, or `cpu`")
    data_s: float | None = maybe(check.seconds, "with `first_step`: waited for data so far")
    save_s: float | None = maybe(check.seconds, "with `first_step`: stopped for saves so far")


@event("mesh", by="rank 0")
class MeshBuilt(LedgerFact):
    """How `parallelize` has spread the model over the ranks."""

    engine: str = maybe(check.words, "`engine.kind` as it was chosen")
    ranks_per_node: int | None = maybe(check.count, "ranks on each node")
    pp: int | None = maybe(check.count, "pipeline stages")
    dp_replicate: int | None = maybe(check.count, "replicas")
    dp_shard: int | None = maybe(check.count, "ranks that share one replica's parameters")
    tp: int | None = maybe(check.count, "ranks of a tensor-parallel group")
    ep: int | None = maybe(check.count, "ranks of an expert-parallel group")
    cp: int | None = maybe(check.count, "ranks that share sequences")


@event("interval", by="rank 0")
class IntervalSet(LedgerFact):
    """How often is saved from now on."""

    seconds: float | None = maybe(check.seconds, "between two saves; 0 where steps count")
    steps: int | None = maybe(check.count, "between two saves, where the setting counts steps")
    why: str = maybe(check.words, "the setting that says so, or how it was chosen")
    cost_s: float | None = maybe(check.seconds, "what a save was taken to cost")
    mtbf_s: float | None = maybe(check.seconds, "the mean time between failures that was assumed")


@event("memory_copies", by="rank 0")
class MemoryCopiesSet(LedgerFact):
    """How often the state is copied into the nodes' memory from now on."""

    steps: int | None = maybe(check.count, "between two copies; 0 where none are made any more")
    bytes: int | None = maybe(check.count, "of the first node's memory that are taken for copies")
    stall_s: float | None = maybe(check.seconds, "that training waits for a copy")
    covered_s: float | None = maybe(
        check.seconds, "from a copy's beginning until all nodes have it whole"
    )
    left_out: int | None = maybe(check.count, "copies so far that did not count, or came late")
    why: str = maybe(check.words, "the setting that says so, how it was chosen, or what is missing")


@event("save_mode", by="rank 0")
class SaveModeSet(LedgerFact):
    """Saves are not made in the background."""

    mode: str = maybe(check.words, "`sync`")
    why: str = maybe(check.words, "what is missing")


@event("restored", by="rank 0")
class CheckpointRestored(LedgerFact):
    """A checkpoint was read, or there was none; the event's time is the end of it."""

    step: int | None = maybe(check.count, "training goes on from here; 0 without a checkpoint")
    by: str = maybe(
        check.words, "`program` where it restores for itself and has told where it goes on"
    )
    checkpoint: str | None = maybe(check.words, "its name; none where nothing was restored", None)
    from_world_size: int | None = maybe(check.count, "ranks that had written it")
    world_size: int | None = maybe(check.count, "ranks that read it")
    seconds: float | None = maybe(check.seconds, "that it took")
    bytes_read: int | None = maybe(check.count, "by rank 0")
    skipped: tuple[Skipped, ...] = maybe(
        check.skipped_checkpoints, "newer ones that were not taken: step, name, reason"
    )
    read_from: str = maybe(
        check.copy_source,
        "`memory` where it was a copy in the nodes' memory, `peer` where a lost node's part of it "
        "came from another node's memory; else it lay on disk",
    )


@event("steps", by="rank 0")
class StepsDone(LedgerFact):
    """A step mark: the steps since the one before it."""

    first: int | None = maybe(check.count, "first step")
    last: int | None = maybe(check.count, "last step")
    sample_first: int | None = maybe(check.count, "samples consumed before the first step")
    sample_last: int | None = maybe(check.count, "samples consumed after the last step")
    loss: float | None = maybe(check.number, "of the last step; may be NaN or infinite")
    grad_norm: float | None = maybe(check.number, "of the last step; may be NaN or infinite")
    seconds: float | None = maybe(check.seconds, "for all steps, by the clock")
    p50_s: float | None = maybe(check.seconds, "half of the steps took no longer")
    p95_s: float | None = maybe(check.seconds, "95 % of the steps took no longer")
    tokens: float | None = maybe(check.number, "trained on, all ranks")
    flops: float | None = maybe(check.number, "that the model needed, all ranks")
    skipped: int | None = maybe(check.count, "updates that were left out")
    data_s: float | None = maybe(check.seconds, "waited for data in this attempt so far")
    save_s: float | None = maybe(check.seconds, "stopped for saves in this attempt so far")
    slow_rank: int | None = maybe(check.count, "the slowest rank")
    slow_by: float | None = maybe(
        check.seconds, "by which share its own work took longer than usual"
    )
    at_save: bool | None = maybe(
        check.flag, "a save follows; its checkpoint holds the last step", None
    )
    total: int | None = maybe(check.count, "steps that the program is to do in all, as it says")


@event("saved", by="rank 0, or the agent of node 0")
class CheckpointSaved(LedgerFact):
    """A checkpoint was committed."""

    step: int = needed(check.count, "updates in it")
    bytes: int | None = maybe(check.count, "its size")
    seconds: float | None = maybe(check.seconds, "from its begin to its commit")
    stall_s: float | None = maybe(check.seconds, "that training stood still")
    waited_s: float | None = maybe(check.seconds, "that training waited for the save before")
    mode: str = maybe(check.words, "`sync`, `async`, or `memory`: from copies, by the agents")
    checkpoint: str = maybe(check.words, "its name")
    same_as_before: bool | None = maybe(check.flag, "not a bit differs from the one before", None)


@event("sealed", by="rank 0 or the agent of node 0")
class CheckpointSealed(LedgerFact):
    """A checkpoint that the program has saved in its own way has its digests, and can be chosen."""

    step: int | None = maybe(check.count, "updates in it, where that is known")
    path: str = maybe(check.path, "the file or folder")
    bytes: int | None = maybe(check.count, "its size")
    seconds: float | None = maybe(
        check.seconds, "that it took to read it and, of a copy, to write it"
    )
    own_s: float | None = maybe(
        check.seconds, "since the program told its step: its own save took no longer"
    )
    by: str = maybe(check.words, "`program` for `run.sealed`, or `agent`")
    name: str = maybe(check.words, "the seal's")
    is_copy: bool = maybe(check.flag, "the run has its bytes too")


@event("resume_chosen", by="the agent of node 0, or rank 0 without one")
class ResumeChosen(LedgerFact):
    """Before the ranks start: which sealed checkpoint the program may resume from."""

    step: int | None = maybe(check.count, "its step, where that is known")
    path: str = maybe(check.path, "the file or folder; empty where none was taken")
    name: str = maybe(check.words, "the seal's")
    seconds: float | None = maybe(check.seconds, "that the proof took")
    bytes_read: int | None = maybe(check.count, "for it")
    put_back: bool = maybe(check.flag, "the run's copy was put in the place of a torn one")
    skipped: tuple[Skipped, ...] = maybe(
        check.skipped_checkpoints, "newer ones that were not taken: step, name, reason"
    )


@event("save_failed", by="rank 0")
class SaveFailed(LedgerFact):
    """A save did not become a checkpoint; training continues."""

    step: int | None = maybe(check.count, "the step")
    why: str = maybe(check.words, "what went wrong")


@event("save_skipped", by="rank 0")
class SaveSkipped(LedgerFact):
    """A save that was due was left out."""

    step: int | None = maybe(check.count, "the step")
    why: str = maybe(check.words, "what kept it")


@event("prune_failed", by="rank 0")
class PruneFailed(LedgerFact):
    """Old checkpoints could not be deleted."""

    step: int | None = maybe(check.count, "the checkpoint after which it was tried")
    why: str = maybe(check.words, "what went wrong")


@event("verified", by="the login node")
class CheckpointVerified(LedgerFact):
    """`checkpoints verify --deep` has read every byte of a checkpoint, and it is right."""

    step: int | None = maybe(check.count, "the step")
    name: str = maybe(check.words, "its name")


@event("checkpoint_set_aside", by="rank 0, or the agent of node 0 for a sealed one")
class CheckpointSetAside(LedgerFact):
    """A damaged checkpoint was moved out of the way of the loads."""

    name: str = maybe(check.words, "its name; of a sealed one the path that it had")
    step: int | None = maybe(check.count, "the step")
    reason: str = maybe(check.words, "what is wrong with it")


@event("evaluation_asked", by="the login node")
class EvaluationAsked(LedgerFact):
    """Somebody wants a checkpoint evaluated that was not due."""

    step: int = needed(check.count, "the step")


@event("evaluated", by="the batch side of the evaluation's job, or the next to look at it")
class Evaluated(LedgerFact):
    """A checkpoint's evaluation is over, or cannot be. Of several about a step the last counts."""

    step: int = needed(check.count, "the checkpoint")
    run: str = maybe(check.words, "name of the run that evaluated it; empty where none could")
    metrics: Mapping[str, float] = maybe(check.metrics, "what it has found, by name")
    why: str = maybe(check.words, "what went wrong")


@event("imported", by="the login node")
class CheckpointImported(LedgerFact):
    """`checkpoints import` has made a checkpoint of a strange one."""

    step: int | None = maybe(check.count, "the step that it was given")
    bytes: int | None = maybe(check.count, "its size")
    kind_of_source: str = maybe(check.words, "the format that was read")
    source: str = maybe(check.path, "where it lay")


@event("stop_requested", by="rank 0")
class StopRequested(LedgerFact):
    """All ranks have agreed to stop; the last save follows."""

    cause: StopCause | None = maybe(check.one_of(StopCause), "what asked for it")
    rank: int | None = maybe(check.count, "the writer")


@event("stopped", by="rank 0")
class TrainingStopped(LedgerFact):
    """The ranks leave before the end of training, after the last save."""

    step: int | None = maybe(check.count, "the step that they had come to")


@event("nonfinite", by="rank 0")
class StepNotFinite(LedgerFact):
    """A step's loss or gradient norm was not a number, or infinite (`guard.nonfinite`)."""

    step: int | None = maybe(check.count, "the step")
    loss: float | None = maybe(check.number, "over all ranks; may be NaN or infinite")
    grad_norm: float | None = maybe(check.number, "of all ranks; may be NaN or infinite")
    rank: int | None = maybe(check.count, "who had it before anything travelled, if that is known")
    ranks: tuple[int, ...] = maybe(check.counts, "all ranks that had it by themselves")
    node: str = maybe(check.words, "that rank's")
    parameter: str = maybe(check.words, "the first that was met")
    samples: tuple[int, ...] = maybe(check.counts, "of that rank's microbatch, 64 at most")
    in_weights: bool = maybe(check.flag, "the weights themselves were not finite")
    transient: bool | None = maybe(
        check.flag, "computed again it was finite; none where it could not be", None
    )
    left_out: bool = maybe(check.flag, "the update was left out")


@event("spike", by="rank 0")
class StepSpiked(LedgerFact):
    """A step's loss or gradient norm lay far above those before it (`guard.spike`)."""

    step: int | None = maybe(check.count, "the step")
    what: str = maybe(check.words, "`loss` or `grad_norm`")
    value: float | None = maybe(check.number, "what it was")
    usual: float | None = maybe(check.number, "the median of those before it")
    deviations: float | None = maybe(check.number, "how many deviations it lay above that")
    left_out: bool = maybe(check.flag, "the update was left out")


@event("batch_skipped", by="rank 0")
class BatchSkipped(LedgerFact):
    """A batch was read, and its update left out by a guard: a hole in what was trained on."""

    step: int | None = maybe(check.count, "the step")
    first: int | None = maybe(check.count, "samples consumed before it")
    last: int | None = maybe(check.count, "samples consumed after it")
    why: str = maybe(check.words, "`nonfinite` or `spike`")


@event("rewound", by="rank 0")
class TrainingRewound(LedgerFact):
    """A guard has ended the round: the next start resumes from a step before this one."""

    step: int | None = maybe(check.count, "the step at which that was decided")
    to: int | None = maybe(check.count, "the run resumes from no checkpoint with more updates")
    first: int | None = maybe(check.count, "samples consumed before those that are left out")
    last: int | None = maybe(check.count, "samples consumed after them; none where none are")
    why: str = maybe(check.words, "`nonfinite`, `spike` or `replicas`")


@event("replicas_differ", by="rank 0")
class ReplicasDiffer(LedgerFact):
    """Ranks that should hold the same weights do not (`guard.replicas`)."""

    step: int | None = maybe(check.count, "up to this one they were compared")
    clean: int | None = maybe(check.count, "the last step whose weights were surely right")
    ranks: tuple[int, ...] = maybe(check.counts, "whose weights are wrong")
    nodes: tuple[str, ...] = maybe(check.texts, "theirs")
    certain: bool = maybe(check.flag, "most others agree; else nobody knows who of them is wrong")
    compared: int | None = maybe(check.count, "ranks that should hold the same")


@event("done", by="rank 0; the batch side for a program that does not call `hpctrain.init()`")
class TrainingDone(LedgerFact):
    """Training has come to its end."""

    step: int | None = maybe(check.count, "the last step")


@event("profile_requested", by="rank 0")
class ProfileRequested(LedgerFact):
    """The ranks will trace these steps."""

    first: int | None = maybe(check.count, "first step")
    last: int | None = maybe(check.count, "last step")
    ranks: tuple[int, ...] | None = maybe(check.counts, "that trace; none for all", None)
    token: str = maybe(check.identifier, "that of the request")


@event("profiled", by="rank 0")
class ProfileWritten(LedgerFact):
    """These steps were traced."""

    first: int | None = maybe(check.count, "first step")
    last: int | None = maybe(check.count, "last step")
    ranks: tuple[int, ...] | None = maybe(check.counts, "that traced; none for all", None)
    folder: str = maybe(check.path, "where the traces lie")


@event("failure", by="the agent of node 0")
class RankFailed(LedgerFact):
    """The first failure of an attempt."""

    rank: int | None = maybe(check.count, "who failed")
    node: str = maybe(check.words, "where")
    kind_of: str = maybe(check.words, "`exception`, `signal`, `exit`, `hang` or `desync`")
    summary: str = maybe(check.words, "one line")
    traceback: str = maybe(check.words, "its end, where it is one of Python")
    others: tuple[int, ...] = maybe(check.counts, "ranks that failed after it")


@event("ranks_awaited", by="the agent of node 0")
class RanksAwaited(LedgerFact):
    """Some ranks have returned, and the others show no sign of life."""

    returned: int | None = maybe(check.count, "how many ranks have returned with 0")
    left: tuple[int, ...] = maybe(check.counts, "ranks that have not")
    quiet_s: float | None = maybe(check.seconds, "for how long they did nothing")
    limit_s: float | None = maybe(check.seconds, "after which they are ended: `run.end_wait_s`")
    ended: bool = maybe(check.flag, "they were ended")


@event("suspended", by="the agent of node 0")
class JobSuspended(LedgerFact):
    """The job continues after its scheduler had suspended it: nothing moved on any node."""

    seconds: float | None = maybe(check.seconds, "for how long")


@event("hang_suspected", by="the agent of node 0")
class HangSuspected(LedgerFact):
    """Ranks stand for longer than such a phase takes; `attempts/N/hang.json` has what was found."""

    kind_of: str = maybe(
        check.words,
        "`stopped`, `returned`, `behind`, `mismatch`, `deadlock`, `network` or `unknown`",
    )
    ranks: tuple[int, ...] = maybe(check.counts, "who holds up the others")
    summary: str = maybe(check.words, "one line: who waits for whom, and where that one is")
    stood_s: float | None = maybe(check.seconds, "for how long they had stood")
    limit_s: float | None = maybe(check.seconds, "after which a look is taken")


@event("hang_cleared", by="the agent of node 0")
class HangCleared(LedgerFact):
    """The ranks that were suspected continue; such a phase may take longer from now on."""

    seconds: float | None = maybe(check.seconds, "for how long they had stood")


@event("hang", by="the agent of node 0")
class HangFound(LedgerFact):
    """Nothing has moved since the suspicion: the ranks hang. Fields as of `hang_suspected`."""

    kind_of: str = maybe(check.words, "as of `hang_suspected`")
    ranks: tuple[int, ...] = maybe(check.counts, "who holds up the others")
    summary: str = maybe(check.words, "one line: who waits for whom, and where that one is")
    stood_s: float | None = maybe(check.seconds, "for how long they had stood")
    limit_s: float | None = maybe(check.seconds, "after which a look is taken")
    ended: bool = maybe(check.flag, "the round was ended; else it was only told")


@event("node_lost", by="the agent of node 0; another one where it is node 0 that was lost")
class NodeLost(LedgerFact):
    """A node of the job takes part no more, and the job has not ended by that."""

    node: str = maybe(check.words, "its name")
    why: str = maybe(check.words, "what was seen of it")
    was_spare: bool = maybe(check.flag, "it was waiting, and no rank ran there")
    was_first: bool = maybe(check.flag, "its agent led the others")
    members: tuple[str, ...] = maybe(
        check.texts, "nodes that go on, by node rank; missing where the run cannot go on here"
    )


@event("desync", by="the agent of node 0")
class RanksOutOfStep(LedgerFact):
    """Ranks do not call equally many collectives any more, and continue."""

    ranks: tuple[int, ...] = maybe(check.counts, "the fewer ones that differ from the others")
    summary: str = maybe(check.words, "one line")
    ended: bool = maybe(check.flag, "the round was ended; else it was only told")


@event("straggler", by="the agent of node 0")
class StragglerFound(LedgerFact):
    """Ranks are slower than the others, or steps take longer and nobody is."""

    kind_of: str = maybe(check.words, "`rank`, `node`, `data` (they wait for it) or `network`")
    ranks: tuple[int, ...] = maybe(check.counts, "which; none for nobody")
    nodes: tuple[str, ...] = maybe(check.texts, "theirs")
    by: float | None = maybe(check.number, "as a part of a step; for nobody, of what steps took")
    lost_s: float | None = maybe(check.seconds, "so long the others have waited so far (s)")
    growing: bool = maybe(check.flag, "it has become more all along the last windows of steps")
    summary: str = maybe(check.words, "one line")


@event("straggler_gone", by="the agent of node 0")
class StragglerGone(LedgerFact):
    """Ranks that were slow are as quick as the others again, or steps take what they took."""

    ranks: tuple[int, ...] = maybe(check.counts, "which; none for nobody")
    lost_s: float | None = maybe(check.seconds, "so long the others have waited (s)")


@event("attempt_ended", by="the agent of node 0, the batch side, or the next attempt")
class AttemptEnded(LedgerFact):
    """An attempt has ended."""

    reason: EndReason = maybe(check.one_of(EndReason), "why", EndReason.UNKNOWN)
    next: Next = maybe(check.one_of(Next), "what follows", Next.ASK_BATCH)
    step: int | None = maybe(check.count, "the last step that is known of")
    heard: float | None = maybe(check.moment, "the last sign of life of the ranks")
    ended_at: float | None = maybe(check.moment, "the scheduler's end of that start")
    detail: str = maybe(check.words, "one line more")
    facts: Mapping[str, Any] = maybe(check.mapping, "what the scheduler said of the job")
    by: str = maybe(check.words, "`agent`, `batch`, or `successor`: the next attempt")


@event("restart_paused", by="the agent of node 0")
class RestartPaused(LedgerFact):
    """The ranks start again inside the allocation, after a while."""

    seconds: float | None = maybe(check.seconds, "that is waited, unless the job is asked to stop")


@event("requeued", by="the agent of node 0 or the batch side")
class Requeued(LedgerFact):
    """The scheduler runs the job again."""

    by: str = maybe(check.words, "who asked: `agent`, `batch`, or `scheduler` by itself")
    job_id: str = maybe(check.identifier, "the job")
    restarts: int | None = maybe(check.count, "of the start that ends")


@event("requeue_failed", by="the agent of node 0 or the batch side")
class RequeueFailed(LedgerFact):
    """The scheduler did not want to run the job again, or gave no answer."""

    by: str = maybe(check.words, "`agent` or `batch`")
    why: str = maybe(check.words, "what it said")


@event("excluded", by="the agent of node 0")
class NodesExcluded(LedgerFact):
    """The job continues without nodes that were found bad."""

    nodes: tuple[str, ...] = needed(check.texts, "host names")


@event("exclude_failed", by="the agent of node 0")
class ExcludeFailed(LedgerFact):
    """Bad nodes could not be kept out of the job's next start."""

    why: str = maybe(check.words, "what the scheduler said")


@event("run_stopped", by="the agent of node 0 or the batch side")
class RunStopped(LedgerFact):
    """Nothing follows of itself: a budget is spent, or a start would end as this one did."""

    reason: EndReason = maybe(check.one_of(EndReason), "that of the attempt", EndReason.UNKNOWN)
    exit_code: int | None = maybe(check.count, "of the job; see `hpctrain help exit-codes`")
    detail: str = maybe(check.words, "one line")


@event("fenced", by="the agent of node 0")
class AttemptFenced(LedgerFact):
    """An attempt gave way to a newer one."""

    job_id: str = maybe(check.identifier, "its job")


@event("orphan_left", by="the agent of node 0")
class OrphanLeft(LedgerFact):
    """A job that is not the run's own has left without an attempt."""

    job_id: str = maybe(check.identifier, "that job")
    why: str = maybe(check.words, "how it is known")


@event("preflight", by="the agent of node 0")
class NodesChecked(LedgerFact):
    """What the nodes were found to be before the ranks were started."""

    bad: Mapping[str, str] = maybe(check.mapping, "what is wrong, by host name")
    leave: bool = maybe(check.flag, "the job is run again without them")
    no_answer: str = maybe(check.words, "nodes that did not answer")
    collective: str = maybe(check.words, "what is wrong with what was tried between nodes")


@event("environment_staged", by="the batch side")
class EnvironmentStaged(LedgerFact):
    """Nodes start from a copy of the Python environment, as far as that could be made."""

    staged: int = maybe(check.count, "nodes that have unpacked it", 0)
    reused: int = maybe(check.count, "nodes that had it already", 0)
    not_staged: int = maybe(check.count, "nodes that start from the shared environment", 0)
    why: str = maybe(check.words, "why those do, by node")
    way: str = maybe(check.words, "`sbcast`, or `read` where each node has read the archive")
    folder: str = maybe(check.path, "where it lies on a node")
    seconds: float | None = maybe(check.seconds, "that it took, all nodes")
    job_id: str = maybe(check.identifier, "the job")
    restarts: int | None = maybe(check.count, "how often the scheduler had restarted the job")


@event("environment", by="the agent of node 0")
class EnvironmentSet(LedgerFact):
    """What the ranks were given; `attempts/N/environment.json` has the values."""

    site: str = maybe(check.words, "the preset")
    nodes: int | None = maybe(check.count, "how many")
    versions: Mapping[str, str] = maybe(
        check.mapping, "of torch, NCCL, its plugin, and the GPU's name"
    )
    overridden: tuple[Mapping[str, str], ...] = maybe(
        check.mappings,
        "what the preset says and somebody has set otherwise: name, by, instead_of, value",
    )
    unset: tuple[str, ...] = maybe(check.texts, "variables of the job that the ranks do not get")
    notes: tuple[str, ...] = maybe(check.texts, "what to know besides")


@event("notified", by="the agent of node 0 or the batch side")
class Notified(LedgerFact):
    """A notification was sent, or was to be; see docs/watching.md."""

    what: str = maybe(check.words, "of what")
    ok: bool = maybe(check.flag, "in every way that is set")
    why: str = maybe(check.words, "what went wrong")
