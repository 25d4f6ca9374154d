"""Jobs beside a run and behind it: evaluations, and runs that wait for others (--after, --then).

The scheduler waits (`JobRequest.after`), and the job reads the ledgers once more before it starts
(`agent/batch_side.py`). A run's ledger names its followers, so that a resume can point their jobs
to its new one.

A job beside a run has the run's settings and another program, which is found when the run is
submitted and kept in its spec (`Spec.beside`). It runs on the keys of its section (`nodes`,
`ranks_per_node`, `gpus_per_node`, `time`, `partition`, `qos`), or else on the run's own.
tests/unit/submit/test_after.py, test_then.py, test_side_job.py and tests/slurm/test_after.py hold
the promises.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler.base import Accounting, get_cluster
from hpctrain.core.base import clock
from hpctrain.core.base.files import PACKAGE
from hpctrain.core.base.records import TERMINAL_JOB, JobState
from hpctrain.core.settings.check import BOUNDED
from hpctrain.core.settings.external import names_of
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.layers import DEFAULT, Layer
from hpctrain.core.settings.schema import EvaluateSettings, Settings, replaced, value_at
from hpctrain.core.settings.spec import Entry, Spec, load_spec
from hpctrain.errors import ClusterError, HpctrainError, RunExists, UsageError
from hpctrain.launch.change import ResumeRequest, resettle
from hpctrain.launch.checks import runs_inside
from hpctrain.launch.live_job import live_job
from hpctrain.launch.program import read_program
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import Followed
from hpctrain.ledger.run.find_run import find_run
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import own_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.launch.snapshot import Checkout

THEN = "then"
_NAME_LENGTH = 100
EVALUATE = "evaluate"
NOT_SEALED = (
    "evaluate: only hpctrain's own checkpoints are evaluated, not those of checkpoint.sealed"
)
_ALLOCATION = ("nodes", "ranks_per_node", "gpus_per_node", "time", "partition", "qos")
_RUNS_OWN = ("", -1)
_OF_THE_RUN_ALONE = (
    "alive.shrink",
    "alive.spares",
    "checkpoint.keep_best",
    "checkpoint.sealed",
    "environment.stage",
    *(f"evaluate.{key}" for key in keys_of(EvaluateSettings)),
    "profile.memory",
    "profile.ranks",
    "profile.steps",
    "run.resume_args",
    "run.resume_if",
    "run.snapshot",
)
"""They are about the run's own program, or would make a job beside the job beside it."""
_MESH = tuple(f"engine.{axis}" for axis in BOUNDED)
_WORDS = {
    RunState.CREATED: "was never submitted",
    RunState.FAILED: "has failed",
    RunState.STOPPED: "was stopped before it was done",
    RunState.CANCELLED: "was cancelled",
}


@dataclass(frozen=True)
class Awaited:
    """A predecessor that is not done.

    `job_id` is of its job, which is pending or running.
    """

    run: str
    run_dir: str
    job_id: str


def find_predecessors(texts: Sequence[str], name: str | None, runs: Path) -> list[str]:
    """The directories of the runs that are meant, each once.

    `texts` are what the user gave; `name` is the new run's, if the user has chosen one.

    Raises:
        NotFound: there is no such run.
        ChecksFailed: it is another user's, or others can write it.
        UsageError: the run itself is meant.
    """
    if name is not None and name in texts:
        raise UsageError(f"--after {name} is the run itself: name another run")
    found_runs = [find_run(text, runs=runs) for text in texts]
    for text, run in zip(texts, found_runs, strict=True):
        own_spec(run, named=text)
    return list(dict.fromkeys(str(run.root) for run in found_runs))


def check_after(root: Path, spec: Spec) -> list[Awaited]:
    """The predecessors that a job of the run would have to wait for now.

    The run's directory `root` need not be there yet.

    Raises:
        UsageError: a predecessor will not be done by itself, or cannot be waited for; or the run
            would come after itself.
        ClusterUnreachable: nobody can say whether one is alive.
    """
    if not spec.after:
        return []
    refuse_circle(root, spec.after)
    if RunHistory.read(RunDir(root), marks="few").has_begun:
        return []
    waits = [waits for path in spec.after if (waits := _awaited(RunDir(Path(path)), spec.cluster))]
    for option in spec.settings.slurm.extra if waits else ():
        if "--dependency" in names_of(option):
            raise UsageError(
                f"slurm.extra: {option!r} does not go with --after, which says what the job waits "
                "for: leave one of them out"
            )
    return waits


def note_follower(run: RunDir, after: Sequence[str]) -> None:
    """Write into the predecessors' ledgers who follows them."""
    for path in after:
        predecessor = RunDir(Path(path))
        if str(run.root) not in RunHistory.read(predecessor, marks="few").followers:
            ledger.record(predecessor, Followed(run=str(run.root)))


def redirect_followers(run: RunDir) -> list[str]:
    """Point the jobs that wait for this run to the job that it has now.

    Returns:
        A line for each run that was to follow and has not begun, also where it cannot.
    """
    lines = (_redirect(RunDir(Path(path)), run) for path in RunHistory.read(run).followers)
    return [line for line in lines if line]


def resume_command(run: RunDir) -> str:
    """What resumes the run, as one would type it."""
    return f"`hpctrain resume {run.typed}`"


def _awaited(run: RunDir, cluster: str) -> Awaited | None:
    """The predecessor with its job; None where it is done."""
    history = RunHistory.read(run, marks="few")
    now = history.state
    if now.phase is RunState.DONE:
        return None
    after, first = f"--after {run.name}: it", f"{resume_command(run)} first"
    if (now.job_id or "").startswith(TERMINAL_JOB) and now.phase not in OVER:
        raise UsageError(f"{after} runs in a terminal, not in a job: try again when it is done")
    spec = load_spec(run.spec)
    scheduler = get_cluster(spec.cluster)
    job = live_job(run, scheduler)
    if job is None:
        words = _WORDS.get(now.phase, "has no job any more, and is not done")
        raise UsageError(f"{after} {words}; {first}")
    if now.cancel and now.job_id in {None, job.job_id}:
        raise UsageError(
            f"{after} was asked to end (job {job.job_id}), so it will not be done; when it has "
            f"ended, {first}"
        )
    if spec.cluster != cluster or not scheduler.has_dependencies:
        raise UsageError(
            f"{after} has job {job.job_id} on {spec.cluster}, for which a job on {cluster} cannot "
            "wait: try again when it is done"
        )
    return Awaited(run.name, str(run.root), job.job_id)


def _redirect(follower: RunDir, run: RunDir) -> str:
    """Have the follower's job wait for its predecessors' jobs of now; what became of it."""
    try:
        spec = own_spec(follower, named=str(follower.root))
        history = RunHistory.read(follower, marks="few")
        if str(run.root) not in spec.after or history.has_begun:
            return ""  # a copy's ledger names the original's followers
        cluster = get_cluster(spec.cluster)
        job = live_job(follower, cluster)
        if job is None:
            again = f"{follower.name} is to follow and has no job"
            return f"{again}: {resume_command(follower)} submits it"
        if job.state != JobState.PENDING:
            return ""
        jobs = [_job_of(RunDir(Path(path))) for path in spec.after]
        cluster.follow(job.job_id, list(filter(None, jobs)))
        return f"{follower.name} (job {job.job_id}) now waits for job {_job_of(run)}"
    except ClusterError as error:
        return (
            f"{follower.name} is to follow, and its job could not be notified: {error}; "
            f"`hpctrain cancel {follower.typed}`, then {resume_command(follower)}"
        )
    except (HpctrainError, OSError):
        return ""  # removed, or not ours any more


def _job_of(run: RunDir) -> str:
    """The newest job of a predecessor; "" where it is done."""
    now = RunHistory.read(run, marks="few").state
    return "" if now.phase is RunState.DONE else now.job_id or ""


def refuse_circle(root: Path, after: Sequence[str]) -> None:
    """Refuse runs of which each waits for another, so that none could begin.

    Raises:
        UsageError: with their names in order.
    """
    from graphlib import CycleError, TopologicalSorter

    before = {root: [Path(path) for path in after]}
    unread = [*before[root]]
    while unread:
        path = unread.pop()
        if path in before:
            continue
        before[path] = []
        with contextlib.suppress(HpctrainError, OSError):  # it is not there
            before[path] = [Path(one) for one in load_spec(RunDir(path).spec).after]
        unread += before[path]
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        way = " after ".join(path.name for path in reversed(error.args[1]))
        raise UsageError(
            f"--after makes a circle, in which no run could begin: {way}; choose "
            "another --name or another --after (of a run that is there: `after` in its spec.json)"
        ) from None


def take_then(
    spec: Spec,
    scripts: Sequence[str],
    runs: Path,
    environ: Mapping[str, str],
    *,
    accounting: Accounting | None = None,
) -> tuple[list[Spec], list[str]]:
    """Put the programs into the run's spec, once each is known to work.

    `scripts` are command lines, each of which runs after the one before it.

    Returns:
        The specs of the runs that are to follow, as they would be, and what the user should know.

    Raises:
        NotFound: there is no such program.
        RunExists: there is a run of such a name.
        UsageError: a program cannot run, or its job cannot be.
    """
    for at, script in enumerate(scripts):
        where = f"--then {script!r}"
        spec.beside[_key(at)] = read_script(spec, THEN, script, environ, where=where)
    following, notes = then_specs(spec, runs / spec.name, accounting=accounting)
    for name in (job.name for job in following):
        if len(name) > _NAME_LENGTH:
            raise UsageError(f"--then makes a run {name}, a name of more than {_NAME_LENGTH}")
        if (runs / name).exists():
            raise RunExists(f"{runs / name} exists, and --then makes a run of that name")
    return following, notes


def then_specs(
    spec: Spec, root: Path, *, accounting: Accounting | None = None
) -> tuple[list[Spec], list[str]]:
    """The runs that are to follow a run, one behind the other. Writes nothing.

    The run's `spec` has their programs.
    """
    following: list[Spec] = []
    notes, before = list[str](), root
    while (key := _key(len(following))) in spec.beside:
        own = replace(spec, beside={THEN: spec.beside[key]})
        name = f"{root.name}-{key}"
        job, more = side_spec(own, THEN, name=name, accounting=accounting)
        following.append(replace(job, after=[str(before)]))
        notes += more
        before = root.parent / name
    return following, notes


def _key(at: int) -> str:
    """What the program is called in the spec, and its run behind the run's name."""
    return THEN if at == 0 else f"{THEN}-{at + 1}"


def take_beside(
    spec: Spec,
    environ: Mapping[str, str],
    *,
    before: Spec | None = None,
    accounting: Accounting | None = None,
) -> list[str]:
    """Put the program of evaluations into the run's spec, once it is known to work.

    `before` is the spec as it was, at a resume: what it names already is not looked for anew.

    Returns:
        What the user should know.

    Raises:
        NotFound: there is no such program.
        UsageError: it cannot run, or its job cannot be.
    """
    kept, spec.beside = spec.beside, {}
    script = spec.settings.evaluate.script
    if not script:
        return []
    same = before is not None and before.settings.evaluate.script == script
    entry = kept.get(EVALUATE) if same else None
    if entry is None:
        where = f"{spec.origins.get('evaluate.script', DEFAULT)}: evaluate.script"
        entry = read_script(spec, EVALUATE, script, environ, where=where)
    spec.beside[EVALUATE] = entry
    notes = side_spec(spec, EVALUATE, name=spec.name, accounting=accounting)[1]
    return [*notes, NOT_SEALED] if spec.settings.checkpoint.sealed else notes


def read_script(
    spec: Spec, section: str, script: str, environ: Mapping[str, str], *, where: str
) -> Entry:
    """What a command line is to run, found as `submit` finds what stands behind `--`.

    A message calls it `where`.
    """
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise UsageError(f"{where} cannot be taken apart into words: {error}") from None
    if not words:
        raise UsageError(f"{where} has nothing but blanks; name a program, or leave it empty")
    inside = runs_inside(spec.settings, get_cluster(spec.cluster))
    try:
        program = read_program(words, Path(spec.entry.cwd), environ, inside=inside)
    except HpctrainError as error:
        raise type(error)(f"{where}: {error}") from None
    if program.env or program.asked:
        raise UsageError(
            f"{where} is {words[0]}'s command: name what it starts; {section}.nodes and "
            f"{section}.ranks_per_node say on how many ranks"
        )
    return program.entry


def side_spec(
    spec: Spec, section: str, *, name: str, accounting: Accounting | None = None
) -> tuple[Spec, list[str]]:
    """The spec of a job beside a run, checked as a submit checks its own. Writes nothing.

    The job has the program and the allocation of `section`. `accounting` None asks nobody.

    Returns:
        It, and what the user should know.

    Raises:
        UsageError: the site or the scheduler would not take such a job.
    """
    own = replace(
        spec,
        name=name,
        run_id=os.urandom(8).hex(),
        created=clock.now(),
        entry=spec.beside[section],
        beside={},
        after=[],
    )
    asked = _layer(spec, section)
    request = ResumeRequest({}, accounting=accounting)
    try:
        job, notes = resettle(own, [asked], request)
    except UsageError as error:
        mesh = {path: value_at(Settings(), path) for path in _MESH}
        if replaced(spec.settings, mesh) == spec.settings:
            raise
        # Its program may not spread the model at all, and then needs no mesh.
        job, notes = resettle(own, [asked, _as_layer(mesh, "default")], request)
        notes = [f"without the run's mesh: {error}", *notes]
    return job, [f"{section}: {note}" for note in notes]


def live_notes(spec: Spec, checkout: Checkout | None) -> list[str]:
    """Which programs beside a run are not in the copy of its code, but for our own."""
    from hpctrain.launch.snapshot import has_copy

    why = "" if checkout is None else ": it is not in the run's copy of the code"
    return [
        f"{section}: later edits of {Path(entry.path).name} count{why}"
        for section, entry in spec.beside.items()
        if entry.kind != "program"
        and not has_copy(entry.path, checkout)
        and not Path(entry.path).is_relative_to(PACKAGE)
    ]


def _layer(spec: Spec, section: str) -> Layer:
    """What the section says of the job's allocation, and what is not for a job beside the run."""
    defaults = Settings()
    values = {path: value_at(defaults, path) for path in _OF_THE_RUN_ALONE}
    values |= {"run.snapshot": "no"}
    for key in _ALLOCATION:
        given = value_at(spec.settings, f"{section}.{key}")
        if given not in _RUNS_OWN:
            values[f"slurm.{key}"] = given
    return _as_layer(values, section, spec.origins)


def _as_layer(
    values: Mapping[str, Any], section: str, origins: Mapping[str, str] | None = None
) -> Layer:
    tree: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        at, _, key = path.partition(".")
        tree.setdefault(at, {})[key] = value

    def where(at: str, key: str) -> str:
        origin = (origins or {}).get(f"{section}.{key}", DEFAULT)
        return f"{origin} ({section}.{key})" if at == "slurm" else DEFAULT

    return Layer(section, tree, where)
