"""`hpctrain sites init`: a first preset for this cluster, written to a file.

tests/unit/site/test_draft.py holds the promises.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("init")
@click.option("--from-slurm", "source", flag_value="slurm", help="Ask the SLURM that answers here.")
@click.option("--name", metavar="NAME", help="The site's name.  [default: SLURM's ClusterName]")
@click.option(
    "--output", "-o", metavar="FILE", type=click.Path(path_type=Path), help="Write there, anew."
)
def command(*, source: str | None, name: str | None, output: Path | None) -> None:
    """Write a draft of this cluster's preset from what SLURM tells of it.

    Partitions with their limits, GPUs and usable CPUs, preemption with grace and signal, KillWait.
    What SLURM does not know is left out: `hpctrain sites probe` finds interfaces and adapters.

    \b
    hpctrain sites init --from-slurm                      print it
    hpctrain sites init --from-slurm -o mycluster.toml    write it
    hpctrain sites validate mycluster.toml
    hpctrain sites test mycluster.toml
    """  # noqa: D301 - click wants the control character
    from datetime import date

    from hpctrain.errors import UsageError
    from hpctrain.scheduler.base import get_cluster
    from hpctrain.site.draft import draft, site_name

    if source is None:
        raise click.UsageError("nothing to draft from; say --from-slurm.")
    facts = get_cluster(source).facts()
    chosen = name or (output.stem if output else site_name(facts.name))
    text = draft(facts, name=chosen, today=date.today().isoformat())  # noqa: DTZ011 - a day
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--output {output} exists; name another file, or delete it") from None
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from None
    click.echo(f"{output}: a draft for {facts.name}; next: hpctrain sites validate {output}")
