"""`hpctrain profile` and `stacks`: what a run's steps spend their time on, where its ranks are.

tests/unit/cli/test_profile.py, test_stacks.py and tests/engines/test_hang_watch.py hold the
promises.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import foreign_option, json_option, run_argument, runs_option
from hpctrain.cli.progress import line
from hpctrain.core.base import clock
from hpctrain.core.base.files import follow_folder
from hpctrain.core.base.text import count, duration, fold_ranks
from hpctrain.core.settings.check import MOST_STEPS, rank_set
from hpctrain.core.terminal import echo_json
from hpctrain.errors import HpctrainError, UsageError, WrongState
from hpctrain.ledger.history.progress import listens
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import RunState, run_state
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import AttemptStarted, ProfileRequested, ProfileWritten
from hpctrain.ledger.run.find_run import find_run
from hpctrain.ledger.run.ownership import own_spec
from hpctrain.node.hangs import stacks
from hpctrain.observe.profile.trace import (
    PROBLEM,
    TRACE,
    FoundProfile,
    ProfileRequest,
    StepWindow,
    find,
    read_request,
)
from hpctrain.observe.profile.verdict import Profile, as_text, examine
from hpctrain.observe.status.reader import running_attempt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpctrain.ledger.run.events import Event
    from hpctrain.ledger.run.layout import RunDir


STEPS = 3
POLL_S = 0.3
LOOK_S = 10.0
"""Between two questions to the scheduler whether the run still runs. Traces of a run that has ended
are written after its last word, and may be seen a little late: so a second look follows."""


@click.command(
    name="profile",
    epilog="""\b
Examples:
  hpctrain profile lm-3                            the profiles of a run
  hpctrain profile lm-3 --now --wait               profile 3 steps of rank 0 now
  hpctrain profile lm-3 --now --steps 5 --ranks 0,7
  hpctrain profile lm-3 --now --ranks all --memory
  hpctrain submit --nodes 4 --profile steps=100:103,ranks=0,7
                                                   steps known beforehand
""",
)
@run_argument
@click.option("--now", is_flag=True, help="Profile the next steps of a live run.")
@click.option("--steps", type=int, metavar="N", help=f"With --now: how many.  [default: {STEPS}]")
@click.option("--ranks", metavar="R[,R]|all", help="With --now: which.  [default: 0]")
@click.option("--memory", is_flag=True, help="With --now: also record GPU memory.")
@click.option("--wait", is_flag=True, help="With --now: wait for the profile and show it.")
@json_option
@foreign_option
@runs_option
def command(
    *,
    run: str,
    now: bool,
    steps: int | None,
    ranks: str | None,
    memory: bool,
    wait: bool,
    foreign: bool,
    as_json: bool,
    runs: Path,
) -> None:
    """Show the use of time in profiled steps, rank by rank, and the bottleneck.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest. The traces
    themselves open in ui.perfetto.dev and in TensorBoard.
    """
    run_dir = find_run(run, runs=runs)
    follow_folder(run_dir.root)
    given = {"--steps": steps, "--ranks": ranks, "--memory": memory, "--wait": wait}
    if not now:
        if idle := [flag for flag, value in given.items() if value]:
            raise UsageError(f"{idle[0]} needs --now; without it old profiles are shown")
        _show(run_dir, as_json=as_json)
        return
    own_spec(run_dir, named=run, foreign=foreign)
    before = find(run_dir.profile)
    request, expected = _ask_for(
        run_dir, steps=STEPS if steps is None else steps, ranks=ranks or "0", memory=memory
    )
    if wait:
        profile = wait_for(run_dir, before, expected)
        _print(run_dir, [profile], as_json=as_json)
    elif as_json:
        echo_json({"run": run_dir.name, "job_id": request.job_id, "token": request.token})
    else:
        count = "the next step" if request.steps == 1 else f"{request.steps} steps"
        who = "all ranks" if request.ranks is None else fold_ranks(request.ranks)
        click.echo(f"asked {run_dir.name} (job {request.job_id}) to profile {count} of {who}")
        click.echo(f"\n  hpctrain profile {run_dir.typed}")


def _show(run: RunDir, *, as_json: bool) -> None:
    """Print every profile of a run."""
    found_profiles = find(run.profile)
    profiles = []
    with line() as shown:
        for number, profile in enumerate(found_profiles, 1):
            if shown.in_place:  # in a log a line for something that takes a second is too much
                count = f"{number} of {len(found_profiles)}"
                shown.show(f"reading profile {count} ({len(profile.files)} ranks)")
            profiles.append(examine(profile))
    window = under_way(ledger.read(run))
    if window is not None and not as_json:
        click.echo(f"steps {window.first} to {window.last} are being profiled")
    elif not found_profiles and not as_json:
        click.echo(f"{run.name} has no profile so far; while it runs, this takes one:")
        click.echo(f"\n  hpctrain profile {run.typed} --now --wait")
    _print(run, profiles, as_json=as_json)


def _print(run: RunDir, profiles: list[Profile], *, as_json: bool) -> None:
    if as_json:
        echo_json({"run": run.name, "profiles": [profile.as_json() for profile in profiles]})
    elif profiles:
        click.echo("\n\n".join(as_text(profile) for profile in profiles))


class NotProfiled(HpctrainError):
    """The run ended before it was profiled."""


def _ask_for(
    run: RunDir, *, steps: int, ranks: str, memory: bool
) -> tuple[ProfileRequest, set[int]]:
    """Leave the request that rank 0 looks for; and the ranks that will be traced."""
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"--steps is {steps}; it takes 1 to {MOST_STEPS}")
    wanted = rank_set(ranks, where="--ranks")
    events = ledger.read(run)
    started = _running(run, events)
    world_size = started.world_size or 1
    if wanted is not None and wanted[-1] >= world_size:
        raise UsageError(f"--ranks names {wanted[-1]}; {run.name} has ranks 0 to {world_size - 1}")
    job_id = started.job_id
    _refuse_second(run, events, job_id)
    request = ProfileRequest(job_id, secrets.token_hex(4), steps, wanted, memory, clock.now())
    request.write(run.profile_request)
    return request, set(range(world_size) if wanted is None else wanted)


def wait_for(run: RunDir, before: Sequence[FoundProfile], expected: set[int]) -> Profile:
    """Wait until every expected rank has written a profile that was not there `before`; read it.

    Raises:
        NotProfiled: the run ended before.
    """
    there_before = {(one.attempt, one.window) for one in before}
    looked_at, looks_gone = clock.monotonic(), 0
    with line() as shown:
        while True:
            new = (
                one for one in find(run.profile) if (one.attempt, one.window) not in there_before
            )
            profile = next(new, None)
            files = profile.files if profile is not None else {}
            written = {rank for rank, of in files.items() if TRACE in of or PROBLEM in of}
            if profile is not None and (written >= expected or looks_gone > 1):
                return examine(profile)
            if looks_gone > 1:
                run.profile_request.unlink(missing_ok=True)
                raise NotProfiled(f"{run.name} was not profiled: it does not run any more")
            if clock.monotonic() - looked_at > LOOK_S:
                looked_at = clock.monotonic()
                looks_gone = 0 if _runs(run) else looks_gone + 1
            progress = f"{len(written)} of {len(expected)} ranks have written their traces"
            shown.show(progress if written else "waiting for the profiled steps")
            clock.sleep(POLL_S)


def _runs(run: RunDir) -> bool:
    with contextlib.suppress(WrongState):
        running_attempt(run, ledger.read(run))
        return True
    return False


def _running(run: RunDir, events: Sequence[Event]) -> AttemptStarted:
    """The beginning of the attempt that runs."""
    started = running_attempt(run, events)
    if started is None or not listens(RunHistory.of(events)):
        raise UsageError(
            f"{run.name} cannot hear of this: its program has not called hpctrain.init() so far"
        )
    return started[1]


def under_way(events: Sequence[Event]) -> StepWindow | None:
    """The profile that was asked for in the newest attempt and is not done yet."""
    newest = max((e.attempt or 0 for e in events), default=0)
    if _state_by_ledger(events) is not RunState.RUNNING:
        return None
    facts = [e.fact for e in events if e.attempt == newest]
    done = {_window(fact).first for fact in facts if isinstance(fact, ProfileWritten)}
    asked = [_window(fact) for fact in facts if isinstance(fact, ProfileRequested)]
    return next((window for window in reversed(asked) if window.first not in done), None)


def _state_by_ledger(events: Sequence[Event]) -> RunState:
    return run_state(RunHistory.of(events).state, None, asked=False)


def _refuse_second(run: RunDir, events: Sequence[Event], job_id: str) -> None:
    window = under_way(events)
    if window is not None:
        raise UsageError(
            f"{run.name} is being profiled already, steps {window.first} to {window.last}; "
            f"`hpctrain profile {run.typed}` shows it when it is done"
        )
    if read_request(run.profile_request, job_id) is not None:
        raise UsageError(
            f"{run.name} has been asked for a profile already and has not answered yet; "
            "it does so before one of its next steps"
        )


def _window(fact: ProfileRequested | ProfileWritten) -> StepWindow:
    return StepWindow(fact.first or 0, fact.last or 0)


ANSWER_S = 30.0
"""So long may the agents take, and the shared disk to show what they have written."""
_LAUNCHER = re.compile(r"/hpctrain/node/agent/ranks\.py:\d+ ")
STANDS_S = 5.0
"""Ranks that have not moved for so long stand: who waits for whom is then worth a line."""


class NoStacks(HpctrainError):
    """The agents have not answered."""


@click.command(
    name="stacks",
    epilog="""\b
Examples:
  hpctrain stacks lm-3                where each rank of a live run is
  hpctrain stacks lm-3 --rank 5       the whole stack of rank 5
  hpctrain stacks lm-3 --json         everything, for programs
""",
)
@run_argument
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="The whole stack of this rank."
)
@json_option
@foreign_option
@runs_option
def stacks_command(*, run: str, rank: int | None, foreign: bool, as_json: bool, runs: Path) -> None:
    """Show where in its program each rank of a live run is, without disturbing it.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest. Ranks
    at one place share a line. If ranks hang, shows which rank blocks the others.
    """
    run_dir = find_run(run, runs=runs)
    follow_folder(run_dir.root)
    own_spec(run_dir, named=run, foreign=foreign)
    attempt, job_id, world_size = _running_ranks(run_dir)
    if rank is not None and rank >= world_size:
        raise UsageError(f"--rank is {rank}; {run_dir.name} has ranks 0 to {world_size - 1}")
    document = _answer(run_dir, attempt, job_id)
    if rank is not None:
        document = {**document, "ranks": [row for row in document["ranks"] if row["rank"] == rank]}
    if as_json:
        echo_json({"run": run_dir.name, "attempt": attempt, **document})
    elif rank is not None:
        click.echo(one_rank(document, rank))
    else:
        click.echo(stacks_text(document))


def _running_ranks(run: RunDir) -> tuple[int, str, int]:
    """The number of the attempt that runs, its job, and how many ranks it has."""
    started = running_attempt(run, ledger.read(run))
    if started is None:
        raise WrongState(f"{run.name} has no ranks so far, so there is nothing to look at")
    number, fact = started
    return number, fact.job_id, fact.world_size or 1


def _answer(run: RunDir, attempt: int, job_id: str) -> dict[str, Any]:
    token, path = secrets.token_hex(4), stacks.path_of(run.attempt(attempt))
    stacks.ask(run.stacks_request, job_id, token)
    deadline_s = clock.monotonic() + ANSWER_S
    try:
        with line() as shown:
            while (document := stacks.answer(path, token)) is None:
                if clock.monotonic() > deadline_s:
                    raise NoStacks(
                        f"the agents of {run.name} have not answered within {ANSWER_S:.0f} s: its "
                        "ranks may just be starting or leaving, or its job was submitted by a "
                        "version of hpctrain that cannot"
                    )
                shown.show("waiting for the agents")
                clock.sleep(POLL_S)
    finally:
        run.stacks_request.unlink(missing_ok=True)
    return document


def stacks_text(document: Mapping[str, Any]) -> str:
    """Ranks by the place where they are, and what their standing means."""
    places: dict[str, list[int]] = {}
    for row in document["ranks"]:
        places.setdefault(_place(row), []).append(row["rank"])
    lines = [f"{fold_ranks(ranks)}: {place}" for place, ranks in places.items()]
    if document["silent"]:
        lines.append(f"{fold_ranks(document['silent'])}: their nodes' agents do not answer")
    if meaning := _meaning(document):
        lines += ["", meaning]
    return "\n".join(lines)


def one_rank(document: Mapping[str, Any], rank: int) -> str:
    """All that is known of a rank."""
    for row in document["ranks"]:
        frames: Sequence[str] | None = row["frames"]
        stack = ["not known"] if frames is None else [f"  {frame}" for frame in _program(frames)]
        return "\n".join([f"rank {rank} on {row['node']}: {_place(row)}", *stack])
    return f"rank {rank}: its node's agent does not answer"


def _program(frames: Sequence[str]) -> Sequence[str]:
    """The frames, innermost first, without those by which the agent has started the program."""
    start = next((at for at, frame in enumerate(frames) if _LAUNCHER.search(frame)), len(frames))
    while start and "runpy>:" in frames[start - 1]:
        start -= 1
    left = len(frames) - start
    if not start or not left:
        return frames
    return [*frames[:start], f"... {count(left, 'frame')} of the launcher (--json has all)"]


def _meaning(document: Mapping[str, Any]) -> str:
    """Who holds up the others, where nobody moves."""
    stood = [row["stood_s"] for row in document["ranks"] if row["stood_s"] is not None]
    summary = document["verdict"]["summary"]
    if document["is_suspected"]:
        return f"it may hang: {summary}"
    if not stood:
        waits = document["verdict"]["kind"] != "unknown"
        again = "look again: where that stays, it is a hang"
        return f"at this moment {summary}; {again}" if waits else ""
    if min(stood) < STANDS_S:
        return ""
    return f"nothing has moved for {duration(min(stood))}: {summary}"


def _place(row: Mapping[str, Any]) -> str:
    state = stacks.state_in_words(row)
    if row["has_returned"]:
        return state
    at = row["at"] or "where it is is not known"
    inside = f" (step {row['step']}, in {row['phase']})" if row["phase"] else ""
    return f"{state and state + ', '}{at}{inside}"
