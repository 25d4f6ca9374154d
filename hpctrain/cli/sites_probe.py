"""`hpctrain sites probe`: what this node has, for a preset."""

from __future__ import annotations

import os

import click

from hpctrain.cli.options import json_option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpctrain.preflight.facts import NodeFacts


@click.command("probe")
@click.option("--toml", "as_toml", is_flag=True, help="A draft of [network], [expect], [storage].")
@json_option
def command(*, as_toml: bool, as_json: bool) -> None:
    """Read this node: interfaces, adapters, GPUs, limits, versions.

    Run it on a compute node, as in `srun -N1 hpctrain sites probe`. Changes nothing.
    """
    from hpctrain.errors import UsageError
    from hpctrain.preflight.draft import draft
    from hpctrain.preflight.probe import probe
    from hpctrain.terminal import echo_json

    if as_toml and as_json:
        raise UsageError("--toml and --json: choose one")
    facts = probe(os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    if as_json:
        echo_json(facts.plain())
    elif as_toml:
        click.echo(draft(facts), nl=False)
    else:
        _show(facts)


def _show(facts: NodeFacts) -> None:
    """One line for each fact; what could not be read says why."""
    from hpctrain.drawing import echo_table

    rows: list[tuple[str, str]] = [("node", facts.node), ("host", facts.host)]
    interfaces = facts.interfaces or []
    rows += [
        (f"interface {i.name}", f"{'up' if i.up else 'down'} {' '.join(i.addresses)}")
        for i in interfaces
    ]
    rows += [
        (f"adapter {p.hca}:{p.port}", f"{p.state} {p.rate_gbps:g} Gb/s {p.link_layer}")
        for p in facts.ports or []
        if p.rate_gbps is not None
    ]
    rows += [("efa", ", ".join(facts.efa or [])), ("slingshot", ", ".join(facts.cxi or []))]
    rows += [
        (f"gpu {g.index}", f"{g.name}, driver {g.driver}, NVLinks {g.nvlinks}")
        for g in facts.gpus or []
    ]
    rows += [
        ("shared memory", f"{facts.shm_gib} GiB" if facts.shm_gib else ""),
        ("memlock", _kib(facts.memlock or "")),
        ("nofile", str(facts.nofile or "")),
    ]
    rows += [(f"disk {folder}", f"{free} GiB free") for folder, free in (facts.local or {}).items()]
    rows += [(name, value) for name, value in (facts.versions or {}).items()]
    rows += [(f"nccl.conf {name}", value) for name, value in (facts.nccl_conf or {}).items()]
    rows = [row for row in rows if row[1]]
    rows += [(name, f"unknown: {why}") for name, why in facts.unreadable.items()]
    echo_table(rows)


def _kib(limit: str) -> str:
    return f"{limit} KiB" if limit.isdigit() else limit
