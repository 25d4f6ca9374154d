"""`hpctrain init`: a project's hpctrain.toml, from a few questions with what was found here.

tests/unit/cli/test_init.py holds the promises.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import complete_partition
from hpctrain.cluster.scheduler.base import Accounting, default_cluster, get_cluster
from hpctrain.errors import HpctrainError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    Facts = Mapping[str, Any]

_USUAL = ("train.py", "main.py", "pretrain.py", "finetune.py", "run.py")
"""Names of programs that are taken first."""
_OF_SLURM = ("partition", "account", "gpus_per_node", "nodes", "time")
HALF_A_DAY_S = 43_200.0
_OWN = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")


def as_toml(facts: Facts) -> str:
    """The settings file."""
    pattern = facts.get("checkpoint")
    tables: dict[str, dict[str, object]] = {
        "slurm": {key: facts.get(key) for key in _OF_SLURM},
        "checkpoint": {"sealed": [pattern] if pattern else None},
        "run": {"resume_args": facts.get("resume_args")},
    }
    lines = ["# This project's settings; flags of submit win. All: hpctrain help settings"]
    for name, values in tables.items():
        given = [f"{key} = {_plain(value)}" for key, value in values.items() if value]
        lines += ["", f"[{name}]", *given] if given else []
    return "\n".join(lines) + "\n"


def _plain(value: object) -> str:
    """A value as TOML has it, which is JSON's way for these."""
    return json.dumps(value, ensure_ascii=False)


@click.command(
    name="init",
    epilog="""\b
Examples:
  hpctrain init                          asks, with detected values as defaults
  hpctrain init --partition gpu --gpus-per-node 4 --program train.py --yes
                                         for scripts: detects the rest
""",
)
@click.option("--program", metavar="FILE", help="Your training program.")
@click.option("--partition", "-p", shell_complete=complete_partition, help="Partition(s).")
@click.option("--account", "-A", help="Account to charge.")
@click.option("--gpus-per-node", type=click.IntRange(min=0), metavar="G", help="GPUs per node.")
@click.option("--nodes", "-N", metavar="N|MIN-MAX", help="Nodes.")
@click.option("--time", "-t", metavar="LIMIT", help="Time limit of one job.")
@click.option("--checkpoint", metavar="PATTERN", help="Where the program saves, e.g. 'out/*.pt'.")
@click.option(
    "--resume-args", metavar="ARGS", help="What it needs to resume, e.g. '--resume {checkpoint}'."
)
@click.option("-y", "--yes", is_flag=True, help="Use detected values, and do not ask.")
@click.option("--force", is_flag=True, help="Replace an existing hpctrain.toml.")
def command(*, yes: bool, force: bool, **given: str | int | None) -> None:
    """Write hpctrain.toml for this folder, and print the next command.

    Detects your program, its checkpoints, partitions, GPUs and account, and asks about each.
    Without a terminal it uses flags and detected values.
    """
    from hpctrain.launch.prepare import CONFIG_NAME, SubmitRequest, prepare

    path = Path.cwd() / CONFIG_NAME
    if path.exists() and not force:
        raise UsageError(f"{path} is there already: edit it, or add --force to replace it")
    cluster = default_cluster(os.environ)
    asks = not yes and sys.stdin is not None and sys.stdin.isatty()
    facts = _gather(cluster, {k: v for k, v in given.items() if v is not None}, asks=asks)
    before = path.read_text() if path.exists() else None
    path.write_text(as_toml(facts))
    program = shlex.split(facts["program"])
    try:
        request = SubmitRequest(
            cwd=Path.cwd(), environ=os.environ, runs=Path("runs"), command=program,
            cluster_needed=False,
        )  # fmt: skip
        prepare(request)
    except HpctrainError as error:
        path.unlink() if before is None else path.write_text(before)
        raise type(error)(f"nothing was written: {error}") from None
    click.echo(f"wrote {path}:\n\n{as_toml(facts)}")
    words = ["--", *program] if program else []
    for line in (["submit", "--dry-run", *words], ["submit", *words]):
        click.echo(f"  {shlex.join(['hpctrain', *line])}")


def _gather(cluster: str, given: Facts, *, asks: bool) -> Facts:
    """What was given, else asked, else found."""
    facts: dict[str, Any] = dict(given)

    def settle(name: str, question: str, detected: str | int) -> None:
        if name not in given:
            answer = click.prompt(question, default=detected, err=True) if asks else detected
            facts[name] = answer

    settle("program", "Your training program, with its arguments", _program(Path.cwd()))
    accounting = get_cluster(cluster).accounting()
    if accounting is not None:
        there = accounting.partitions() or {}
        default = next((name for name, nodes in there.items() if nodes.is_default), "")
        settle("partition", f"Partition ({', '.join(there) or 'none is known'})", default)
        settle("account", "Account to charge; empty for your default", _account(accounting))
        nodes = there.get(facts["partition"])
        settle("gpus_per_node", "GPUs per node", nodes.gpus if nodes else 0)
        settle("time", "Time limit of one job", _time(nodes.max_time if nodes else ""))
    settle("nodes", "Nodes; 2-4 takes what there is", "1")
    pattern, resume = _saves(facts["program"])
    settle("checkpoint", "Where it saves its checkpoints; empty if hpctrain saves", pattern)
    if facts["checkpoint"]:
        settle("resume_args", "What it needs to resume; empty if it looks itself", resume)
    return facts


def _time(most: str) -> str:
    """Half a day, or a partition's limit where that is less."""
    from hpctrain.cluster.site.validate import seconds

    limit = seconds(most) if most else None
    return most if limit is not None and limit < HALF_A_DAY_S else "12:00:00"


def _program(folder: Path) -> str:
    """The program that a folder is about; "" where that is not plain."""
    there = [path.name for path in sorted(folder.glob("*.py"))]
    usual = [name for name in _USUAL if name in there]
    like = [name for name in there if "train" in name]
    return next(iter([*usual, *like, *(there if len(there) == 1 else [])]), "")


def _account(accounting: Accounting) -> str:
    own = next((os.environ[name] for name in _OWN if os.environ.get(name)), "")
    accounts = sorted(accounting.accounts() or ())
    return own or (accounts[0] if len(accounts) == 1 else "")


def _saves(program: str) -> tuple[str, str]:
    """Where a program saves and what it needs to resume, as far as its source says it."""
    from hpctrain.launch.begins_anew import PLACE, begins_anew

    words = shlex.split(program)
    try:
        text = Path(words[0]).read_text(encoding="utf-8") if words else ""
    except (OSError, ValueError):
        return "", ""
    anew = begins_anew(text, words[1:])
    if anew is None or anew.option is None:
        return "", ""
    value = "" if anew.option.is_flag else " {checkpoint}"
    return "" if anew.pattern == PLACE else anew.pattern, f"{anew.option.name}{value}"
