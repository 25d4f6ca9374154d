"""The options of sbatch and srun that a site demands and refuses. Pure.

tests/unit/scheduler/test_site_script.py holds the promises.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.settings.check import node_range
from hpctrain.settings.sbatch_options import name_of, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpctrain.settings.schema import SlurmSettings
    from hpctrain.site.preset import Site

_STARTERS = frozenset({"#SBATCH", "sbatch", "srun", "salloc"})

# The setting behind an option that hpctrain writes itself, so that a refusal can name it.
_SETTINGS = {
    "--mincpus": "slurm.cpus_per_rank",
    "--cpus-per-task": "slurm.cpus_per_rank",
    "--exclusive": "slurm.exclusive",
    "--signal": "slurm.signal_lead_s",
}


def gpu_options(settings: SlurmSettings, site: Site | None) -> list[tuple[str, str]]:
    """How the GPUs of a job are asked for here.

    Raises:
        UsageError: the site's way has no form for a range of nodes.
    """
    count = settings.gpus_per_node
    if not count:
        return []
    style = site.slurm.gpu_request if site else "gpus-per-node"
    if site is None or style == "gpus-per-node":
        return [("gpus-per-node", str(count))]
    if style == "none":
        return []
    if style == "gres":
        return [("gres", f"{site.slurm.gres_name}:{count}")]
    least, most = node_range(settings.nodes)
    if least != most:
        raise UsageError(
            f"slurm.nodes is {settings.nodes}, and {site.where('slurm', 'gpu_request')} asks for "
            f"GPUs by --{style}, which fixes their number for the whole job: give one number of "
            "nodes"
        )
    if style == "gpus":
        return [("gpus", str(count * most))]
    # It means nothing without a number of tasks: one on each node, as in the srun line.
    return [("ntasks-per-node", "1"), ("gpus-per-task", str(count))]


def constraint(settings: SlurmSettings, site: Site | None) -> str:
    """The user's node features and the site's, both of them."""
    theirs, own = site.slurm.constraint if site else "", settings.constraint
    if not theirs or not own or theirs == own or theirs in own.split("&"):
        return own or theirs
    return f"{theirs}&({own})" if "|" in own else f"{theirs}&{own}"


def network(settings: SlurmSettings, site: Site | None) -> str:
    """The user's --network with what the site requires of it."""
    parts = [part for part in settings.network.split(",") if part]
    for option in _required(site):
        if name_of(option) == "--network":
            parts += [p for p in option.partition("=")[2].split(",") if p and p not in parts]
    return ",".join(parts)


def more_options(settings: SlurmSettings, site: Site | None, header: Iterable[str]) -> list[str]:
    """The site's own options that the header does not have yet; the user's win over its extras.

    Args:
        settings: With the user's extras.
        site: The preset.
        header: Options that hpctrain writes, `--nodes=2`.

    Raises:
        UsageError: the user's extras change an option that the site requires.
    """
    if site is None:
        return []
    given = [*header, *settings.extra]
    written = {name: option for option in given for name in names_of(option)}
    options: list[str] = []
    for option in _required(site):
        name = name_of(option)
        if name == "--network":
            continue  # joined with the user's, above
        if name not in written:
            options.append(option)
        elif written[name] != option:
            raise UsageError(
                f"{written[name]} does not go with {site.where('slurm', 'required')}, which "
                f"requires {option}: leave it out"
            )
    names = {*written, *map(name_of, options)}
    return options + [option for option in site.slurm.extra if name_of(option) not in names]


def srun_options_of(site: Site | None) -> list[str]:
    """What the site adds to the srun line.

    Raises:
        UsageError: it starts tasks by something else than srun.
    """
    if site is None:
        return []
    refuse_launcher(site)
    export = ["--export=ALL"] if site.slurm.export == "none" else []
    mpi = [f"--mpi={site.slurm.mpi}"] if site.slurm.mpi else []
    return [*export, *mpi, *site.slurm.srun_args]


def refuse_launcher(site: Site) -> None:
    """Refuse a site whose launcher cannot start agents: one on each node, signalled by SLURM.

    Raises:
        UsageError: it is ibrun or mpirun, which start MPI's ranks and hide the node's number.
    """
    launcher = site.slurm.launcher
    if launcher != "srun":
        raise UsageError(
            f"{site.where('slurm', 'launcher')}: the launcher is {launcher}, and hpctrain starts "
            "its agents by srun, one on each node; where "
            "`srun --ntasks-per-node=1 hostname` works in a job, say so in a site file of your "
            'own: slurm.launcher = "srun"'
        )


def refuse_forbidden(
    options: Iterable[tuple[str, str]], site: Site | None, origins: Mapping[str, str]
) -> None:
    """Refuse options that sbatch rejects here, before it does.

    Args:
        options: Option and the setting that it comes from, `("--mem=4G", "slurm.mem")`.
        site: The preset.
        origins: Setting to its place.

    Raises:
        UsageError: one of them is forbidden, with who asked and who forbids.
    """
    refused = site.slurm.forbidden if site else ()
    forbidden = {name for option in refused for name in names_of(option)}
    for option, path in options:
        if site is not None and forbidden.intersection(names_of(option)):
            origin = origins.get(path, "default")
            raise UsageError(
                f"{origin}: {path} asks for {option}, which "
                f"{site.where('slurm', 'forbidden')} says is refused here: leave it out"
            )


def is_forbidden(option: str, site: Site | None) -> bool:
    """Whether sbatch rejects an option here."""
    return site is not None and name_of(option) in {name_of(one) for one in site.slurm.forbidden}


def asked_by_user(settings: SlurmSettings) -> list[tuple[str, str]]:
    """Options among the settings' own texts: extras, srun's, and those in setup lines."""
    options = [(option, "slurm.extra") for option in settings.extra]
    options += [(option, "slurm.srun_args") for option in settings.srun_args]
    return options + [(word, "slurm.setup") for line in settings.setup for word in _options(line)]


def setting_of(option: str) -> str:
    """The setting by which a user can change an option that hpctrain writes."""
    name = name_of(option)
    if name in {"--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--ntasks-per-node"}:
        return "slurm.gpus_per_node"
    return _SETTINGS.get(name, f"slurm.{name[2:].replace('-', '_')}")


def module_lines(site: Site | None) -> list[str]:
    """Shell lines that load the site's modules; a job without one of them ends at once.

    Going on would fail later and less clearly, and again at each requeue.
    """
    if site is None:
        return []
    modules = site.modules
    lines = [f"source {shlex.quote(modules.init)}"] if modules.init else []
    lines += ["module purge"] if modules.purge else []
    lines += [f"module use {shlex.quote(path)}" for path in modules.use]
    lines += [f"module load {shlex.quote(name)}" for name in modules.load]
    where = shlex.quote(f"hpctrain: error: a line of [modules] failed, {site.where('modules')}: ")
    return [f"{line} || {{ echo {where}{shlex.quote(line)} >&2; exit 3; }}" for line in lines]


def _required(site: Site | None) -> Sequence[str]:
    return site.slurm.required if site else ()


def _options(line: str) -> list[str]:
    """Options of a setup line that speaks to SLURM; nothing of other lines, whose flags differ."""
    try:
        words = shlex.split(line, comments=False)
    except ValueError:  # an open quote: bash will say so
        words = line.split()
    if not words or words[0] not in _STARTERS:
        return []
    return [word for word in words[1:] if word.startswith("-") and word.strip("-")]
