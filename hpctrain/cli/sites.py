"""`hpctrain sites`: presets of clusters. Each command is a module of its own."""

from __future__ import annotations

from typing import ClassVar

import click

from hpctrain.cli.main import LazyGroup


class _Sites(LazyGroup):
    table: ClassVar = {
        "list": ("hpctrain.cli.sites_list", "Every site that there is a preset for."),
        "show": ("hpctrain.cli.sites_show", "What a preset says, and where each value stands."),
        "detect": ("hpctrain.cli.sites_detect", "Which site this is, and by what it is known."),
        "validate": ("hpctrain.cli.sites_validate", "Hold presets against what NCCL and SLURM do."),
        "init": ("hpctrain.cli.sites_init", "Write a draft of this cluster's preset."),
        "test": ("hpctrain.cli.sites_test", "Render job scripts and ask sbatch about them."),
        "probe": ("hpctrain.cli.sites_probe", "On a compute node: its interfaces and adapters."),
    }

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing: the exit codes stand in `hpctrain --help`."""


@click.group(name="sites", cls=_Sites)
def command() -> None:
    """Presets of clusters: show, detect, check and write them.

    \b
    hpctrain sites detect                          which site is this?
    hpctrain sites show frontier --env --nodes 2   what would the ranks get there?
    hpctrain sites init --from-slurm >mine.toml    a draft for a cluster of one's own
    hpctrain sites validate mine.toml              is it right?

    Presets are TOML files: those that come with hpctrain, then /etc/hpctrain/sites and
    HPCTRAIN_SITE_PATH, then ~/.config/hpctrain/sites, then site.toml beside hpctrain.toml.
    A file is laid on those of the same name in the layers below.
    """  # noqa: D301 - click wants the control character
