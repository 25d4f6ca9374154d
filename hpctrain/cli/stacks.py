"""`hpctrain stacks`: where each rank of a live run is, and who holds up the others.

tests/unit/cli/test_stacks.py and tests/engines/test_hang_watch.py hold the promises.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import foreign_option, json_option, run_argument, runs_option
from hpctrain.cli.progress import line
from hpctrain.core.base import clock
from hpctrain.core.base.text import count, duration, fold_ranks
from hpctrain.errors import HpctrainError, UsageError, WrongState
from hpctrain.ledger.run import events as ledger
from hpctrain.node.hangs import stacks
from hpctrain.observe.status.reader import running_attempt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpctrain.ledger.run.layout import RunDir

ANSWER_S = 30.0
"""So long may the agents take, and the shared disk to show what they have written."""
POLL_S = 0.2
_LAUNCHER = re.compile(r"/hpctrain/agent/ranks\.py:\d+ ")
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
def command(*, run: str, rank: int | None, foreign: bool, as_json: bool, runs: Path) -> None:
    """Show where in its program each rank of a live run is, without disturbing it.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest. Ranks
    at one place share a line. If ranks hang, shows which rank blocks the others.
    """
    from hpctrain.core.base.files import follow_folder
    from hpctrain.ledger.run.find_run import find_run
    from hpctrain.ledger.run.ownership import own_spec

    run_dir = find_run(run, runs=runs)
    follow_folder(run_dir.root)
    own_spec(run_dir, named=run, foreign=foreign)
    attempt, job_id, world_size = _running(run_dir)
    if rank is not None and rank >= world_size:
        raise UsageError(f"--rank is {rank}; {run_dir.name} has ranks 0 to {world_size - 1}")
    document = _answer(run_dir, attempt, job_id)
    if rank is not None:
        document = {**document, "ranks": [row for row in document["ranks"] if row["rank"] == rank]}
    if as_json:
        from hpctrain.core.terminal import echo_json

        echo_json({"run": run_dir.name, "attempt": attempt, **document})
    elif rank is not None:
        click.echo(one_rank(document, rank))
    else:
        click.echo(as_text(document))


def _running(run: RunDir) -> tuple[int, str, int]:
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


def as_text(document: Mapping[str, Any]) -> str:
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
    """The frames, innermost first, without those by which the agent has started the program.

    All of them where a rank has not come to its program, or is no child of an agent.
    """
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
