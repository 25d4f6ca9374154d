"""Hand a run to its cluster: never two writers, never an orphan job.

The intent is recorded before the scheduler is called, with a token that names the job. If `sbatch`
times out after it was accepted, or this process dies, the next command finds the job by its token
and adopts it. Nodes that a preflight found bad are excluded (`kept_out`).

A run that begins with another's checkpoint gets its copy first, each tensor verified as it is read
and read back. tests/unit/submit/test_kept_out_nodes.py, test_begin_from.py,
tests/slurm/test_two_writers.py, test_node_check.py and tests/e2e/test_begin_from.py hold the
promises.
"""

from __future__ import annotations

import secrets
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.store import find
from hpctrain.cluster.preflight.report import bad_nodes_of_user, bad_nodes_path, read_bad
from hpctrain.cluster.scheduler.base import Cluster, get_cluster
from hpctrain.core.base import clock
from hpctrain.core.base.files import follow_folder, make_private_folder, write_private
from hpctrain.core.base.records import JobRequest
from hpctrain.core.settings.check import with_spares
from hpctrain.errors import (
    ChecksFailed,
    ClusterError,
    ClusterUnreachable,
    NoCheckpoint,
    NotFound,
    TornCheckpoint,
    UsageError,
)
from hpctrain.launch.after import check_after, live_notes, note_follower, resume_command, then_specs
from hpctrain.launch.checks import check_disk
from hpctrain.launch.live_job import live_job, refusal
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import SubmitFailed, SubmitIntent, Submitted
from hpctrain.ledger.run.fence import run_lock
from hpctrain.ledger.run.find_run import IndexedRun, find_run, record
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import own_spec, renew_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Tensor
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.core.settings.spec import Spec
    from hpctrain.launch.environment_archive import ShowProgress
    from hpctrain.launch.prepare import Prepared, SubmitRequest
    from hpctrain.launch.shape import ShapedJob
    from hpctrain.ledger.run.staging import Staging


ADOPT_WAIT_S = 20.0
"""After an sbatch without an answer: how long to look for a job that was accepted all the same."""
LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class SubmittedRun:
    """A run that was made.

    `job_id` is None where no job was to be started. `following` has the name and the job of each
    run that is to follow, None for a job that is not there. `begins_with` is what it has of another
    run, in a line. `shaped` is None where the user has given the shape.
    """

    prepared: Prepared
    run: RunDir
    job_id: str | None
    notes: list[str]
    following: Mapping[str, str | None] = field(default_factory=dict)
    begins_with: str = ""
    shaped: ShapedJob | None = None


def submit_run(
    request: SubmitRequest, *, start: bool = True, progress: ShowProgress | None = None
) -> SubmittedRun:
    """Make a run with a copy of its code, and start its job; nothing stays of one that is refused.

    `start` False makes the directory only. `progress` shows how far what takes long is.

    Raises:
        HpctrainError: see `prepare` and `launch`. After `ClusterUnreachable` the run stays: its
            job may have been accepted, and `resume` finds it.
    """
    from hpctrain.launch.prepare import discard_run, make_run, prepare
    from hpctrain.launch.snapshot import plan_snapshot

    begin, prepared = begin_of(request), prepare(request)
    spec = prepared.spec
    copy = plan_snapshot(spec.entry, spec.settings.run.snapshot)
    shaped = choose_shape_of(prepared) if start else None
    notes = [*prepared.notes, *copy.notes, *(shaped.notes if shaped else ())]
    notes += live_notes(spec, copy.checkout)
    run = make_run(prepared, copy.checkout)
    begins_with = _copy_checkpoint(run, prepared, begin, progress) if begin else ""
    following = _make_following(prepared, run)
    if not start:
        note_follower(run, spec.after)
        # for a batch script of the user's own
        _write_staging(run, _staging(run, spec, notes, progress))
        none = {one.name: None for one, _ in following}
        return SubmittedRun(prepared, run, None, notes, none, begins_with)
    bad = kept_out(run, spec, request.environ)
    notes += kept_out_notes(bad)
    try:
        job_id = launch(
            run, spec, by="submit", exclude=[*bad], notes=notes, progress=progress, shaped=shaped
        )
    except ClusterUnreachable:
        raise
    except (ChecksFailed, ClusterError, NotFound, UsageError):
        for follower, _ in following:
            discard_run(follower)
        discard_run(run, prepared.new_parent)
        raise
    jobs = {one.name: _launch_follower(one, its, list(bad), notes) for one, its in following}
    return SubmittedRun(prepared, run, job_id, notes, jobs, begins_with, shaped)


def choose_shape_of(prepared: Prepared) -> ShapedJob | None:
    """The shape of a new run's job; None where the user has said it.

    Raises:
        UsageError: see `shape.choose_for`.
    """
    if prepared.spec.settings.shape.choose == "no":
        return None
    from hpctrain.launch.shape import choose_for

    return choose_for(prepared.spec, RunDir(prepared.runs / prepared.spec.name))


def begin_of(request: SubmitRequest) -> BeginFrom | None:
    """The checkpoint of another run that a new one is to begin with; see `begin_from`.

    Raises:
        UsageError: what is to be left out is not what something is taken from.
    """
    if not request.begin:
        if request.without:
            raise UsageError(
                "--without says what of --from RUN is left out, and there is no --from"
            )
        return None
    return begin_from(request.begin, request.without, runs=request.cwd / request.runs)


def _copy_checkpoint(
    run: RunDir, prepared: Prepared, begin: BeginFrom, progress: ShowProgress | None
) -> str:
    """Copy it into the run, and say what was taken; on an error nothing stays of either."""
    from hpctrain.launch.prepare import discard_run

    nbytes = sum(tensor.nbytes for tensor in begin.tensors())
    show = (
        progress("copying the checkpoint", 2 * nbytes) if progress else nullcontext(lambda _: None)
    )
    try:
        with show as on_bytes:
            copy_into(run, prepared.spec, begin, on_bytes)
    except BaseException:  # also Ctrl-C
        discard_run(run, prepared.new_parent)
        raise
    return begin.line


def _launch_follower(
    run: RunDir, spec: Spec, exclude: Sequence[str], notes: list[str]
) -> str | None:
    """Start the job of a run that follows another; a note says why there is none."""
    try:
        return launch(run, spec, by="submit", exclude=exclude, notes=notes)
    except (ClusterError, UsageError) as error:
        notes.append(f"{run.name} was not submitted: {error}; {resume_command(run)} submits it")
        return None


def _make_following(prepared: Prepared, run: RunDir) -> list[tuple[RunDir, Spec]]:
    """Make the runs that are to follow; they are known to the run before anything is submitted."""
    if not prepared.following:
        return []
    from hpctrain.launch.prepare import create_run, discard_run

    made: list[tuple[RunDir, Spec]] = []
    try:
        for spec in then_specs(prepared.spec, run.root)[0]:
            made.append((create_run(spec, prepared.runs), spec))
            note_follower(made[-1][0], spec.after)
    except BaseException:
        for follower, _ in made:
            discard_run(follower)
        discard_run(run, prepared.new_parent)
        raise
    return made


def launch(
    run: RunDir,
    spec: Spec,
    *,
    by: str,
    from_step: int | None = None,
    exclude: Sequence[str] = (),
    notes: list[str] | None = None,
    progress: ShowProgress | None = None,
    changed: str = "",
    under_lock: Callable[[], None] = lambda: None,
    shaped: ShapedJob | None = None,
) -> str:
    """Start the run's job, unless one of its jobs may still write; of two callers one is refused.

    Args:
        run: Its directory, with spec.json written.
        spec: What to run.
        by: "submit" or "resume".
        from_step: Take this checkpoint and set newer ones aside.
        exclude: Nodes that a preflight has found bad. Only this job is kept off them.
        notes: Gets what the user should know besides.
        progress: Shows how far what takes long is.
        changed: What a resume runs that did not run before, for the ledger.
        under_lock: Makes ready what the job runs, once no job of the run is alive.
        shaped: The job's nodes and time limit, where they were chosen.

    Returns the job id.

    Raises:
        ChecksFailed: the disk does not do what a run's promises stand on.
        RunAlive: a job of this run is pending or running.
        ClusterError: the scheduler refused; nothing runs.
        ClusterUnreachable: no answer, and no such job was found afterwards.
        UsageError: a run that must be done before will not be, see `after.check_after`.
    """
    cluster = get_cluster(spec.cluster)
    follow_folder(run.root)
    if by == "resume":  # a submit has looked before it made anything
        check_disk(run.root)
    waits = [one.job_id for one in check_after(run.root, spec)]
    note_follower(run, spec.after)
    staging = _staging(run, spec, [] if notes is None else notes, progress)
    with run_lock(run):
        alive = live_job(run, cluster)
        if alive is not None:
            raise refusal(run, alive)
        under_lock()
        _write_staging(run, staging)
        facts = {"by": by, "from_step": from_step, "changed": changed or None}
        return _submit(run, spec, cluster, facts, exclude=exclude, after=waits, shaped=shaped)


def _staging(
    run: RunDir, spec: Spec, notes: list[str], progress: ShowProgress | None
) -> Staging | None:
    """What the job's nodes are to start from; None for the environment as it lies there."""
    if spec.settings.environment.stage == "no":
        return None
    from hpctrain.launch.environment_archive import staging_for

    staging, more = staging_for(spec, run.root.parent, progress)
    notes += more
    return staging


def _write_staging(run: RunDir, staging: Staging | None) -> None:
    if staging is None:
        run.staging.unlink(missing_ok=True)
    else:
        staging.write(run)


def _submit(
    run: RunDir,
    spec: Spec,
    cluster: Cluster,
    facts: Mapping[str, Any],
    *,
    exclude: Sequence[str],
    after: Sequence[str],
    shaped: ShapedJob | None,
) -> str:
    spec.dump(run.spec)  # a resume may have changed settings; nobody reads it while no job is alive
    renew_secret(run)
    token = f"{run.name}-{secrets.token_hex(4)}"  # no other run or submission has it
    rendered = _of_job(without_nodes(spec, exclude), shaped)
    script = cluster.render(rendered, run, token)
    make_private_folder(run.jobs)
    write_private(run.script(token), script, mode=0o700)
    run.stop_request.unlink(missing_ok=True)
    intent = SubmitIntent(token=token, script=str(run.script(token)), slurm_cluster=cluster.here())
    if shaped is not None:
        ledger.record(run, shaped.event(str(facts["by"])))
    ledger.append(run, intent)
    request = JobRequest(run.root, token, run.script(token), script, after)
    try:
        job_id = cluster.submit(request)
    except ClusterUnreachable as error:
        job_id = _adopt(cluster, token, error)
    except ClusterError as error:
        ledger.record(run, SubmitFailed(token=token, why=str(error)))
        if not exclude:
            raise
        raise ClusterError(
            f"{error}; the job was to be kept off {', '.join(exclude)}, which a preflight found "
            "bad (bad-nodes.json, `hpctrain help preflight.md`)"
        ) from None
    # From the intent and its token every later command finds the job, where this is missing.
    submitted = Submitted(
        token=token,
        job_id=job_id,
        cluster=spec.cluster,
        nodes=with_spares(rendered.settings),
        **facts,
        total_steps=spec.settings.train.steps if spec.entry.kind == "recipe" else None,
    )
    ledger.record(run, submitted)
    record([IndexedRun(run, frozenset({job_id}))])
    return job_id


def _of_job(spec: Spec, shaped: ShapedJob | None) -> Spec:
    """The spec with the nodes and the time limit of this job, where they were chosen."""
    if shaped is None:
        return spec
    from hpctrain.launch.shape import in_shape

    return in_shape(spec, shaped.shape)


def _adopt(cluster: Cluster, token: str, error: ClusterUnreachable) -> str:
    """The job that was accepted although the scheduler's answer never came."""
    deadline = clock.monotonic() + ADOPT_WAIT_S
    while True:
        try:
            job = cluster.find_job(token)
        except ClusterUnreachable:
            job = None  # still silent; asked again until the deadline
        if job is not None:
            return job.job_id
        if clock.monotonic() > deadline:
            raise ClusterUnreachable(
                f"{error}; no job with token {token} was found. If it was accepted after all, the "
                "next try finds it by its token and starts no second one. Where this machine "
                "belongs to no cluster: --cluster local"
            ) from error
        clock.sleep(LOOK_AGAIN_S)


def without_nodes(spec: Spec, exclude: Sequence[str]) -> Spec:
    """The spec with more nodes that its job must not get."""
    if not exclude:
        return spec
    slurm = spec.settings.slurm
    nodes = ",".join([*([slurm.exclude] if slurm.exclude else []), *exclude])
    settings = replace(spec.settings, slurm=replace(slurm, exclude=nodes))
    return replace(spec, settings=settings)


def _list_of_user(spec: Spec, environ: Mapping[str, str]) -> Path:
    """The user's list for the run's cluster: by its site's name, else by the scheduler's for it."""
    folder = bad_nodes_of_user(environ, "any").parent
    if spec.site or not folder.is_dir():
        return bad_nodes_of_user(environ, spec.site or spec.cluster)
    return bad_nodes_of_user(environ, name_here(spec))


def name_here(spec: Spec) -> str:
    """What the user's list for this cluster is named by."""
    return spec.site or get_cluster(spec.cluster).here() or spec.cluster


def kept_out(run: RunDir, spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Node to why the run's next job must not get it; none where all nodes are this machine.

    Both lists count: the user's, of `hpctrain preflight` on this cluster, and the run's own, of
    its attempts.
    """
    if get_cluster(spec.cluster).on_this_machine:
        return {}
    lists = (_list_of_user(spec, environ), bad_nodes_path(run))
    return {
        name: f"{bad.reason} ({path})" for path in lists for name, bad in read_bad(path).items()
    }


def kept_out_notes(bad: Mapping[str, str]) -> list[str]:
    """The same for the user to read."""
    return [f"{node} is kept out of the job: {why}" for node, why in bad.items()]


_OF_DATA = "tracked.data"


@dataclass(frozen=True)
class BeginFrom:
    """A checkpoint of another run.

    Attributes:
        run: The other run.
        step: Of the checkpoint.
        path: Where it lies.
        manifest: Its own.
        without: What of it is left out: "optimizer" with all that is tracked beside the model, or
            "data" with the number of the step.
    """

    run: RunDir
    step: int
    path: Path
    manifest: Manifest
    without: tuple[str, ...]

    @property
    def first_step(self) -> int:
        """The step at which the new run begins: 0 where it begins its data anew."""
        return 0 if "data" in self.without else self.step

    @property
    def line(self) -> str:
        """What is taken, for the user."""
        left = f", without its {' and '.join(self.without)}" if self.without else ""
        begins = f"; the first step is {self.first_step + 1}"
        return f"step {self.step} of {self.run.name}{left}{begins}"

    def tensors(self) -> list[Tensor]:
        """What the new run gets of it."""
        from hpctrain.checkpoint.exchange.contents import OPTIM, RNG, TRACKED, tensors

        taken = tensors(self.path, self.manifest)
        if "optimizer" in self.without:
            taken = [
                t for t in taken if not t.name.startswith((OPTIM, TRACKED)) or _is_data(t.name)
            ]
        if "data" in self.without:
            taken = [t for t in taken if not t.name.startswith(RNG) and not _is_data(t.name)]
        return taken

    def state(self) -> dict[str, Any]:
        """The fields of its manifest that go with them."""
        from hpctrain.checkpoint.exchange.contents import CARRIED

        left = {"optimizer": ("extra",), "data": ("data", "rng", "world_size", "mesh")}
        dropped = {name for part in self.without for name in left[part]}
        return {name: getattr(self.manifest, name) for name in CARRIED if name not in dropped}


def _is_data(name: str) -> bool:
    return name == _OF_DATA or name.startswith(f"{_OF_DATA}.")


def begin_from(asked: str, without: Sequence[str], *, runs: Path) -> BeginFrom:
    """Find what `--from RUN[@STEP]` names.

    `asked` is a run as users name runs, with or without a step; its newest checkpoint by default.

    Raises:
        NotFound: there is no such run, or no checkpoint of that step.
        NoCheckpoint: the run has none that this could be begun with, with what to do.
        TornCheckpoint: the one that was named is torn.
        ChecksFailed: somebody else may have written the run.
        UsageError: the step is no number.
    """
    from hpctrain.checkpoint.exchange.contents import MODEL, committed

    name, at, text = asked.partition("@")
    if at and not text.isdecimal():
        raise UsageError(f"--from {asked}: {text!r} is no step; write RUN@STEP, e.g. lm-3@4000")
    run = find_run(name, runs=runs)
    own_spec(run, named=name)
    step = int(text) if at else None
    if step is None:
        newest = find.choose(run).checkpoint
        if newest is None:
            raise NoCheckpoint(f"--from {asked}: {_none_in(run)}")
        step = newest.step
    path, manifest = committed(run, step)
    if not any(entry.name.startswith(MODEL) for entry in manifest.tensors):
        raise NoCheckpoint(f"--from {asked}: step {step} of {run.name} has no model's weights")
    return BeginFrom(run, step, path, manifest, tuple(dict.fromkeys(without)))


def _none_in(run: RunDir) -> str:
    from hpctrain.checkpoint.sealed.resume import glance

    if glance(run)[0] is not None:
        return (
            f"the checkpoints of {run.name} are its program's own; have the program load one: "
            f"`hpctrain checkpoints path {run.typed}` prints where the newest lies"
        )
    return f"{run.name} has no whole checkpoint (`hpctrain checkpoints list {run.typed}`)"


def copy_into(
    run: RunDir, spec: Spec, begin: BeginFrom, on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Give a new run its first checkpoint.

    No job of the run is there yet. `on_bytes` gets the bytes written and the bytes compared.

    Raises:
        CheckpointError: there is no room, or what was written does not read back the same.
        TornCheckpoint: the other run's checkpoint is damaged.
    """
    from hpctrain.checkpoint.exchange import import_into
    from hpctrain.checkpoint.exchange.contents import Contents

    source = Contents("hpctrain", begin.path, [], full_names=True, state=begin.state())
    at = begin.first_step
    try:
        import_into.write(run, spec.run_id, at, source, begin.tensors(), on_bytes=on_bytes)
    except TornCheckpoint as error:
        others = [step for step in find.steps(begin.run) if step != begin.step]
        hint = f"; try --from {begin.run.name}@{others[0]}" if others else ""
        raise TornCheckpoint(f"{begin.path} is damaged: {error}{hint}") from None
