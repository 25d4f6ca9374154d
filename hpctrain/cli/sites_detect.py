"""`hpctrain sites detect`: which preset fits here, and why.

tests/unit/cli/test_sites.py holds the promises.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import json_option

if TYPE_CHECKING:
    from hpctrain.site.detect import Detected, Match


@click.command("detect")
@json_option
def command(*, as_json: bool) -> None:
    """Tell which site this is, and by what it is known.

    Every site whose [detect] fits is listed with its reasons; the highest priority wins, then a
    variable over a marker file over SLURM's ClusterName over the host's name. Exit code 2 where
    nothing decides between two.

    \b
    hpctrain sites detect
    hpctrain sites detect --json | jq -r .site
    """  # noqa: D301 - click wants the control character
    import os

    from hpctrain.scheduler.slurm.facts import cluster_name
    from hpctrain.site.detect import detect, look_around
    from hpctrain.site.load import identities
    from hpctrain.terminal import echo_json

    here = look_around(os.environ, cluster_name)
    detected = detect(identities(os.environ, project=Path.cwd()), here)
    if as_json:
        echo_json(_plain(detected))
    elif detected is None:
        click.echo("no site matches here; --site NAME names one (`hpctrain sites list`)")
    else:
        cells = [
            (_mark(match, detected), match.name, _reasons(match)) for match in detected.matches
        ]
        from hpctrain.drawing import echo_table

        echo_table(cells)
    if detected is not None:
        detected.require_one()


def _mark(match: Match, detected: Detected) -> str:
    if match in detected.tied:
        return "?"
    return "*" if match == detected.chosen else " "


def _reasons(match: Match) -> str:
    passed_over = f" (passed over: {match.passed_over})" if match.passed_over else ""
    return "; ".join(match.reasons) + passed_over


def _plain(detected: Detected | None) -> dict[str, Any]:
    chosen = detected.chosen if detected else None
    return {
        "site": chosen.name if chosen else None,
        "tied": [match.name for match in detected.tied] if detected else [],
        "matches": [
            {
                "name": match.name,
                "signal": match.signal.name.lower(),
                "priority": match.priority,
                "reasons": list(match.reasons),
                "passed_over": match.passed_over,
            }
            for match in (detected.matches if detected else ())
        ],
    }
