"""`hpctrain plan` and `init`: a strategy that fits, with its cost; a project's hpctrain.toml."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import complete_site, json_option
from hpctrain.cluster.scheduler.base import Accounting, default_cluster, get_cluster
from hpctrain.core.terminal import echo_json, echo_note
from hpctrain.errors import HpctrainError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.advise.strategy.choice import PlanRequest, Row, StrategyPlan
    from hpctrain.advise.strategy.facts import ModelFacts
    from hpctrain.cluster.site.schema import Partition, Site

    Facts = Mapping[str, Any]

EXAMPLES = """\b
Examples:
  hpctrain plan config.json --nodes 4 --gpus-per-node 8 --gpu h100-sxm --seq 4096 --global-batch 64
  hpctrain plan ./Llama-7B --site juniper --partition gpu --nodes 2 --compare
  hpctrain plan config.json --gpu a100-sxm-40gb --gpus-per-node 4 --explain memory
  hpctrain plan config.json --gpu-mem 24 --gpus-per-node 4 --measure
  hpctrain plan --params 7B --layers 32 --hidden 4096 --heads 32 --vocab 32000 --gpu-mem 80
  hpctrain plan config.json --gpu l40s --gpus-per-node 4 --lora 16
  hpctrain plan config.json --gpu h100-sxm --gpus-per-node 8 --steps 100000 -o plan/
"""
NUMBERS = ("params", "layers", "hidden", "heads", "kv_heads", "inner", "vocab")
NEEDED = ("layers", "hidden", "heads", "vocab")
_SIZE = click.IntRange(min=1, max=1 << 40)
_RATE = click.FloatRange(min=0, min_open=True)


@click.command(name="plan", epilog=EXAMPLES)
@click.argument("model", required=False)
@click.option("--nodes", type=click.IntRange(1, 100_000), default=1, show_default=True, metavar="N")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(1, 1024),
    metavar="G",
    help="GPUs per node.  [default: the partition's, else 1]",
)
@click.option("--gpu", metavar="NAME", help="Which: h200, a100-sxm-40gb, ...")
@click.option("--gpu-mem", type=float, metavar="GB", help="Memory of a GPU, in 10^9 bytes.")
@click.option(
    "--site", metavar="S", shell_complete=complete_site, help="The cluster's preset, or a file."
)
@click.option("--partition", help="Partition of the preset.")
@click.option(
    "--seq", type=_SIZE, default=2048, show_default=True, metavar="N", help="Positions of a sample."
)
@click.option(
    "--global-batch",
    type=_SIZE,
    metavar="N",
    help="Samples of a step over all GPUs.  [default: one for each GPU]",
)
@click.option(
    "--micro-batch",
    type=_SIZE,
    metavar="N",
    help="Samples of a GPU in one pass.  [default: the most that fit]",
)
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="What is multiplied in; masters and moments are fp32.",
)
@click.option("--steps", type=_SIZE, metavar="N", help="Of the run, for its budget.")
@click.option("--time", metavar="LIMIT", help="Time limit of a job.  [default: the partition's]")
@click.option("--params", metavar="7B", help="Without MODEL: its parameters.")
@click.option("--layers", type=_SIZE, help="Without MODEL: blocks.")
@click.option("--hidden", type=_SIZE, help="Without MODEL: width.")
@click.option("--heads", type=_SIZE, help="Without MODEL: attention heads.")
@click.option("--kv-heads", type=_SIZE, help="Without MODEL: heads of key and value.")
@click.option("--inner", type=_SIZE, help="Without MODEL: width of the MLP.")
@click.option("--vocab", type=_SIZE, help="Without MODEL: classes of the logits.")
@click.option(
    "--family",
    type=click.Choice(["llama", "gpt2", "bert"]),
    default="llama",
    show_default=True,
    help="Without MODEL: its layout.",
)
@click.option(
    "--node-mem", type=_RATE, metavar="GB", help="Memory of a node.  [default: the partition's]"
)
@click.option(
    "--lora",
    type=click.IntRange(1, 65_536),
    metavar="RANK",
    help="Train only adapters of this rank.",
)
@click.option("--link-gbs", type=_RATE, metavar="GB/S", help="Rate between GPUs of a node.")
@click.option("--net-gbs", type=_RATE, metavar="GB/S", help="A GPU's rate to other nodes.")
@click.option("--host-gbs", type=_RATE, metavar="GB/S", help="A GPU's rate to its node's memory.")
@click.option("--save-gbs", type=_RATE, metavar="GB/S", help="Rate at which the job saves.")
@click.option("--compare", is_flag=True, help="Show every strategy.")
@click.option(
    "--explain", type=click.Choice(["memory"]), help="Formulas of the chosen row, with sources."
)
@click.option("--strategy", metavar="KEY", help="Choose this strategy.")
@click.option("--measure", is_flag=True, help="Exact peaks instead of formulas; needs torch.")
@click.option(
    "--build-timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="For --measure.",
)
@click.option(
    "-o", "--output", metavar="DIR", help="Write hpctrain.toml and plan.json into this folder."
)
@json_option
def command(*, model: str | None, as_json: bool, **flags: Any) -> None:
    """Choose how to train MODEL on these GPUs: the simplest strategy that fits, and its cost.

    MODEL is a Hugging Face config.json, or a folder with one; or leave it out and give numbers.
    Nothing is submitted, nothing is trained.
    Exit code 3 where nothing fits.
    """
    from hpctrain.advise.strategy import choice

    plan = _plan(model, flags)
    row = plan.chosen
    written = _write(plan, row, flags) if flags["output"] and row is not None else []
    if as_json:
        from hpctrain.advise.strategy.screen import as_plain

        echo_json(as_plain(plan) | {"written": written})
    else:
        _show(plan, flags, written)
    choice.require_chosen(plan)


def _plan(model: str | None, flags: dict[str, Any]) -> StrategyPlan:
    from hpctrain.advise.strategy import choice
    from hpctrain.advise.strategy.choice import cost, elsewhere_notes, saving

    facts, config = _model(model, flags)
    asked, limit_s = _asked(facts, flags)
    rows = choice.rows_of(asked)
    if flags["measure"]:
        from hpctrain.advise.strategy.measure import measured

        if not config:
            raise UsageError("--measure builds a model, and numbers are none: give MODEL")
        rows = measured(rows, asked, config, flags["build_timeout"])
    row = choice.choose(rows, flags["strategy"])
    assumed = "--global-batch was not given: one sample for each GPU"
    plan = choice.StrategyPlan(asked, rows, row, notes=[] if flags["global_batch"] else [assumed])
    if row is None:
        return plan
    seconds = row.time.seconds if row.time else None
    return replace(
        plan,
        saving=saving(
            choice.saved_params(asked, row),
            asked.cluster,
            save_gbs=flags["save_gbs"],
            max_loss_s=1800.0,
            keep_last=3,
            limit_s=limit_s,
        ),
        cost=cost(asked.steps, seconds, asked.cluster.ranks, limit_s),
        notes=[
            *plan.notes,
            *choice.advice(asked, row),
            *elsewhere_notes(asked, rows, row),
        ],
    )


def _model(model: str | None, flags: dict[str, Any]) -> tuple[ModelFacts, dict[str, Any]]:
    """Return a model's sizes, and the values of its config.json; of numbers there are none."""
    from hpctrain.advise.strategy.facts import count_of, of_numbers
    from hpctrain.advise.strategy.measure import read_model

    given = [name for name in NUMBERS if flags[name] is not None]
    if model is not None:
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} goes without MODEL, which says it")
        return read_model(model)
    missing = [f"--{name}" for name in NEEDED if flags[name] is None]
    if missing:
        raise UsageError(
            f"give MODEL (a config.json, or its folder), or numbers: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        )
    facts = of_numbers(
        params=None if flags["params"] is None else count_of(flags["params"], "--params"),
        layers=flags["layers"],
        hidden=flags["hidden"],
        heads=flags["heads"],
        vocab=flags["vocab"],
        family=flags["family"],
        inner=flags["inner"] or 0,
        kv_heads=flags["kv_heads"] or 0,
    )
    return facts, {}


def _asked(facts: ModelFacts, flags: dict[str, Any]) -> tuple[PlanRequest, float | None]:
    from hpctrain.advise.strategy.activations import FP32
    from hpctrain.advise.strategy.choice import PlanRequest
    from hpctrain.advise.strategy.hardware import gpu_of
    from hpctrain.advise.strategy.strategies import Machines
    from hpctrain.cluster.site.validate import seconds

    site, partition = _partition(flags)
    where = f"partition {flags['partition']} of {flags['site']}"
    of_site = partition.gpu if partition is not None else None
    gpu = gpu_of(
        flags["gpu"] or of_site or None, flags["gpu_mem"], "--gpu" if flags["gpu"] else where
    )
    gpus = flags["gpus_per_node"] or (partition.gpus_per_node if partition else None) or 1
    cluster = Machines(flags["nodes"], gpus, _node_memory(flags["node_mem"], partition))
    limit = flags["time"] or (partition.max_time if partition else "")
    limit_s = seconds(limit) if limit else None
    if flags["time"] and not limit_s:
        raise UsageError(
            f"--time {flags['time']!r} is no time limit; write e.g. 12:00:00 or 1-00:00:00"
        )
    asked = PlanRequest(
        model=facts,
        cluster=cluster,
        gpu=gpu,
        links=_links(flags, gpu.link, site, gpus),
        seq=flags["seq"],
        global_batch=flags["global_batch"] or cluster.ranks,
        micro=flags["micro_batch"] or 0,
        low=FP32 if flags["precision"] == "fp32" else 2,
        steps=flags["steps"],
        lora=flags["lora"] or 0,
    )
    return asked, float(limit_s) if limit_s else None


def _node_memory(given_gb: float | None, partition: Partition | None) -> int | None:
    """Bytes; None where nobody says."""
    if given_gb is not None:
        return round(given_gb * 1e9)
    if partition is not None and partition.mem_gib is not None:
        return round(partition.mem_gib * (1 << 30))
    return None


def _links(flags: dict[str, Any], inside: float | None, site: Site | None, gpus: int) -> Any:
    """Rates as given, else of the GPU's data sheet and the preset's network."""
    from hpctrain.advise.strategy.timing import Links

    between = None
    if site is not None and site.network.rate_gbps and site.network.nics_per_node:
        between = site.network.rate_gbps * 1e9 / 8 * site.network.nics_per_node / gpus
    if flags["link_gbs"]:
        inside = flags["link_gbs"] * 1e9
    if flags["net_gbs"]:
        between = flags["net_gbs"] * 1e9
    host = flags["host_gbs"] * 1e9 if flags["host_gbs"] else None
    return Links(inside, between, host)


def _partition(flags: dict[str, Any]) -> tuple[Site | None, Partition | None]:
    """The preset and its partition: as named, or the only one with GPUs."""
    from hpctrain.cluster.site.load import load_site

    if flags["site"] is None:
        return None, None
    site = load_site(flags["site"])
    name = flags["partition"]
    if name is not None:
        if name not in site.partitions:
            there = ", ".join(site.partitions) or "none"
            raise UsageError(f"--partition {name}: site {flags['site']} knows {there}")
        return site, site.partitions[name]
    with_gpus = [key for key, one in site.partitions.items() if one.gpus_per_node]
    if len(with_gpus) == 1:
        flags["partition"] = with_gpus[0]
        return site, site.partitions[with_gpus[0]]
    if flags["gpu"] or flags["gpu_mem"]:
        return site, None
    there = ", ".join(with_gpus) or "none with GPUs"
    raise UsageError(f"--site {flags['site']} has several partitions: give --partition ({there})")


def _show(plan: StrategyPlan, flags: dict[str, Any], written: list[str]) -> None:
    from hpctrain.advise.strategy import screen
    from hpctrain.core.drawing import echo_table

    row = plan.chosen
    click.echo(screen.heading(plan))
    click.echo(screen.WHOSE)
    click.echo()
    rows = screen.shown_rows(plan, compare=flags["compare"])
    echo_table([screen.cells(each, plan) for each in rows], header=screen.HEADER)
    if row is not None:
        click.echo()
        for line in screen.closing(plan, row):
            click.echo(line)
        if flags["explain"]:
            click.echo()
            for line in screen.explained(plan.asked, row):
                click.echo(line)
    for note in plan.notes:
        echo_note(note)
    if written:
        click.echo(f"wrote {flags['output']}: {' '.join(written)}")


def _write(plan: StrategyPlan, row: Row, flags: dict[str, Any]) -> list[str]:
    """Write the plan's files; those of the same names are replaced."""
    from hpctrain.advise.strategy.screen import as_plain, hpctrain_toml

    texts = {
        "plan.json": json.dumps(as_plain(plan), indent=2) + "\n",
        "hpctrain.toml": hpctrain_toml(
            plan,
            row,
            time=flags["time"] or "24:00:00",
            partition=flags["partition"] or "",
            precision=flags["precision"],
        ),
    }
    folder = Path(flags["output"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return list(texts)


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
@click.option("--partition", "-p", help="Partition(s).")
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
def init(*, yes: bool, force: bool, **given: str | int | None) -> None:
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
