"""`hpctrain checkpoints diff`: two checkpoints beside each other.

tests/unit/checkpoint/test_exchange_diff.py holds the promises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import json_option
from hpctrain.cli.progress import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.checkpoint.exchange.diff import Difference

EXIT_DIFFERS = 1
SHOWN = 20


@click.command(
    "diff",
    epilog="""\b
Examples:
  hpctrain checkpoints diff lm-3 1000 2000        two steps of one run
  hpctrain checkpoints diff lm-3:1000 lm-4:1000   one step of two runs
""",
)
@click.argument("what", nargs=-1, required=True, metavar="RUN STEP STEP | RUN:STEP RUN:STEP")
@click.option("--quick", is_flag=True, help="Do not read values to say by how much they differ.")
@json_option
@click.pass_context
def diff_command(ctx: click.Context, what: tuple[str, ...], *, quick: bool, as_json: bool) -> None:
    """Compare two checkpoints: exit code 0 if they are the same, 1 if not.

    Tensors are compared by their blocks' digests where both were cut alike, else by reading them.
    """
    from hpctrain.checkpoint.exchange import contents, diff
    from hpctrain.run.find_run import find_run
    from hpctrain.terminal import echo_json

    (left, before), (right, after) = _two(what)
    left_checkpoint = contents.committed(find_run(left, runs=ctx.obj), before)
    right_checkpoint = contents.committed(find_run(right, runs=ctx.obj), after)
    total = left_checkpoint[1].size + right_checkpoint[1].size
    with progress("reading", total) as on_bytes:
        difference = diff.compare(
            left_checkpoint, right_checkpoint, values=not quick, on_bytes=on_bytes
        )
    if as_json:
        names = [f"{left}:{before}", f"{right}:{after}"]
        echo_json({"compared": names} | difference.as_json())
    else:
        _tell_difference(difference)
    if not difference.same:
        ctx.exit(EXIT_DIFFERS)


def _is_step(text: str) -> bool:
    return re.fullmatch("[0-9]{1,18}", text) is not None


def _two(what: Sequence[str]) -> tuple[tuple[str, int], tuple[str, int]]:
    """The two checkpoints that are meant."""
    if len(what) == 3 and _is_step(what[1]) and _is_step(what[2]):  # noqa: PLR2004
        return (what[0], int(what[1])), (what[0], int(what[2]))
    pairs = [text.rpartition(":") for text in what]
    if len(what) != 2 or not all(run and _is_step(step) for run, _, step in pairs):  # noqa: PLR2004
        raise click.UsageError(
            f"RUN STEP STEP or RUN:STEP RUN:STEP is wanted, not {' '.join(what)}"
        )
    return (pairs[0][0], int(pairs[0][2])), (pairs[1][0], int(pairs[1][2]))


def _tell_difference(found: Difference) -> None:
    from hpctrain.base.text import size
    from hpctrain.drawing import echo_table

    for sign, names in (("-", found.removed), ("+", found.added)):
        for name in names[:SHOWN]:
            click.echo(f"{sign} {name}")
        if len(names) > SHOWN:
            click.echo(f"{sign} and {len(names) - SHOWN} more (--json shows all)")
    cells = [
        (
            one.name,
            one.before if one.before == one.after else f"{one.before} -> {one.after}",
            None if one.elements is None else f"{one.elements:,}",
            None if one.max_abs is None else f"{one.max_abs:.4g}",
        )
        for one in found.changed[:SHOWN]
    ]
    if cells:
        echo_table(cells, header=("CHANGED", "TYPE", "ELEMENTS", "MAX ABS"), right=(2, 3))
    if len(found.changed) > SHOWN:
        click.echo(f"and {len(found.changed) - SHOWN} more (--json shows all)")
    for row in found.state[:SHOWN]:
        click.echo(f"{row['key']}: {_short(row['before'])} -> {_short(row['after'])}")
    if len(found.state) > SHOWN:
        click.echo(f"and {len(found.state) - SHOWN} more (--json shows all)")
    counts = f"{found.equal} tensors the same, {len(found.changed)} changed"
    counts += f", {len(found.added)} added, {len(found.removed)} removed"
    click.echo(f"{counts}; {size(found.bytes_read)} read")


def _short(value: Any) -> str:
    import json

    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004
