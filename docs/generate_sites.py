"""Writes docs/sites/ from site-configs/*.toml: `python docs/generate_sites.py`.

Each page is made of one preset and the bases that it extends, and of nothing else: no layer of the
machine that this runs on has a say. tests/docs/test_sites.py fails where a page is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.site import schema
from hpctrain.cluster.site.environment import Versions, derive
from hpctrain.cluster.site.sheet import build, take_apart
from hpctrain.core.settings.fields import keys_of
from hpctrain.core.settings.layers import read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpctrain.cluster.site.schema import Partition, PresetValue, Site
    from hpctrain.cluster.site.sheet import SiteFileValues

TOP = Path(__file__).resolve().parents[1]
PRESETS = TOP / "site-configs"
PAGES = TOP / "docs" / "sites"
INDEX = "README"

STABILITY = {
    "reference": "Every value has a public source, and was held against a stored copy of it on "
    "{reviewed}.",
    "unverified": "**A skeleton: hpctrain refuses it** until somebody at the site completes it.",
    "base": "A base that other presets extend; not a cluster.",
    "local": "Written for the machine in front of you.",
}
GROUPS = {
    "common": "for any number of nodes",
    "single_node": "for jobs of one node",
    "multi_node": "for jobs of several nodes",
}
TITLES = {
    "reference": "Clusters",
    "unverified": "Skeletons",
    "base": "Bases",
    "local": "This machine",
}
INDEX_HEAD = """\
# Site presets

<!-- Written by docs/generate_sites.py from site-configs/; change it there. -->

One page for each preset that comes with hpctrain. [sites.md](../sites.md) says how to write one,
how to install it for everybody, and what a cluster's admins can set to make preemption painless.
A fact holds for the day on which its source was stored, which each page names where it is known.
What no page says is left out: unknown stays unknown. Where a page is not the site's own, its source
says whose it is.
ALCF Polaris has no preset: it runs PBS, not SLURM.
"""
INDEX_NOTES = {
    "unverified": "Refused as they are: complete one, then set `stability` to `local`.",
    "base": 'A preset takes one by `extends = "..."`.',
}

WANTED = {
    "slurm": ("account_required", "requeue", "kill_wait_s", "send_user_signal"),
    "network": ("kind", "socket_ifnames", "hcas", "rate_gbps", "nics_per_node"),
    "storage": ("scratch", "fs", "flock", "purge_days"),
    "container": ("runtime",),
}
LIMITS = ("gpus_per_node", "cpus_per_node", "max_time", "max_nodes", "exclusive")

NO_NOTICE = (
    "nothing can be saved any more, and the steps since the last committed checkpoint are done "
    "again (`checkpoint.interval_s` bounds them)"
)
RESUBMIT = (
    "SLURM does not put the job back by itself. hpctrain asks for it (`scontrol requeue`) while "
    "the notice lasts; where the site refuses that, `hpctrain resume RUN` goes on"
)


def pages() -> dict[str, str]:
    """Every page's text by its name, the index among them."""
    sites = {path.stem: load(path.stem) for path in sorted(PRESETS.glob("*.toml"))}
    return {INDEX: index(sites)} | {name: page(site) for name, site in sites.items()}


def load(name: str) -> Site:
    """A packaged preset with its bases, without any other layer."""
    return build(name, _sheets(name))


def _sheets(name: str) -> list[SiteFileValues]:
    file = read_toml(PRESETS / f"{name}.toml", shown=f"site-configs/{name}.toml")
    sheet = take_apart(file, name=name, layer="packaged")
    base = sheet.text("extends")
    return [*(_sheets(base) if base else []), sheet]


def index(sites: dict[str, Site]) -> str:
    """The list of all presets."""
    parts = [INDEX_HEAD]
    for stability, title in TITLES.items():
        chosen = {n: s for n, s in sites.items() if s.about.stability == stability}
        parts.append(f"## {title}\n")
        if stability in INDEX_NOTES:
            parts.append(f"{INDEX_NOTES[stability]}\n")
        rows = [
            (f"[{n}]({n}.md)", s.about.description, s.about.reviewed) for n, s in chosen.items()
        ]
        parts += [*_table(("name", "what", "reviewed"), rows), ""]
    return "\n".join(parts)


def page(site: Site) -> str:
    """The page of one preset."""
    sections = [
        _head(site),
        _partitions(site),
        _preemption(site),
        _facts(site),
        _environment(site),
        _unknown(site),
        _sources(site),
    ]
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def _head(site: Site) -> Iterator[str]:
    about = site.about
    file = f"site-configs/{about.name}.toml"
    yield f"# {about.name}\n"
    yield f"<!-- Written by docs/generate_sites.py from {file}; change it there. -->\n"
    yield f"{about.description}. {STABILITY[about.stability].format(reviewed=about.reviewed)}\n"
    remarks = _remarks(PRESETS / f"{about.name}.toml")
    if remarks:
        yield f"{remarks}\n"
    rows = [("file", f"[{file}](../../{file})")]
    if about.extends:
        chain = [one.name for one in site.files[:-1]]
        rows.append(("extends", ", ".join(f"[{name}]({name}.md)" for name in reversed(chain))))
    rows += [("known by", known) for known in _detection(site)]
    rows += [("contact", about.contact)] if about.contact else []
    rows += [("site's pages", about.url)] if about.url else []
    yield from _table(("", ""), rows)


def _remarks(path: Path) -> str:
    """The comment at the file's head, as a paragraph."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return "\n".join(lines)


def _detection(site: Site) -> list[str]:
    if site.about.stability != "reference":
        return []
    detect = site.detect
    known = [f"`{name}` is `{pattern}`" for name, pattern in detect.env.items()]
    known += [f"`{file}` has `{pattern}`" for file, pattern in detect.file.items()]
    known += [f"SLURM's cluster name is `{pattern}`" for pattern in detect.slurm_cluster]
    known += [f"the host's name is `{pattern}`" for pattern in detect.hostname]
    said = f"nothing that the site documents: say `--site {site.name}` or set `HPCTRAIN_SITE`"
    return known or [said]


def _partitions(site: Site) -> Iterator[str]:
    if not site.partitions:
        return
    yield "## Partitions\n"
    rows = []
    for name, one in site.partitions.items():
        gpus = " x ".join(filter(None, [str(one.gpus_per_node or ""), one.gpu]))
        rows.append(
            (
                f"`{name}`",
                one.description,
                _nodes(one),
                gpus,
                one.cpus_per_node,
                one.mem_gib,
                _longest(one),
                one.exclusive,
                one.auto,
                _sources_below(site, ("partitions", name)),
            )
        )
    head = (
        "name", "what", "nodes", "GPUs of a node", "CPUs", "GiB", "longest job", "whole nodes",
        "chosen by itself", "source",
    )  # fmt: skip
    yield from _table(head, rows)


def _nodes(one: Partition) -> str:
    if one.min_nodes is None and one.max_nodes is None:
        return ""
    return f"{one.min_nodes or 1} to {one.max_nodes or 'any'}"


def _longest(one: Partition) -> str:
    bins = [f"{nodes} nodes: {time}" for nodes, time in one.walltime_bins.items()]
    return "; ".join(bins) or one.max_time


def _preemption(site: Site) -> Iterator[str]:
    if not site.partitions:
        return
    yield "## When SLURM takes the nodes away\n"
    unknown = [f"`{n}`" for n, one in site.partitions.items() if one.preemption.mode == "unknown"]
    for name, one in site.partitions.items():
        if one.preemption.mode != "unknown":
            yield f"- `{name}`: {in_words(one.preemption)}."
    if unknown:
        yield (
            f"- {', '.join(unknown)}: not documented. Without a notice, {NO_NOTICE}; "
            "`hpctrain sites init --from-slurm` reads what is set."
        )
    if site.slurm.send_user_signal is None:
        yield (
            "\nWhether a preemption sends the signal of `--signal` too is not known. hpctrain "
            "takes SIGTERM for the notice as well, so it needs the grace time, not the signal."
        )


def in_words(preemption: schema.Preemption) -> str:
    """What a preemption does to a run, and what it costs."""
    mode, grace = preemption.mode, preemption.grace_s
    if mode == "none":
        return "jobs are not preempted"
    parts = []
    if preemption.exempt_s:
        parts.append(f"not in a job's first {preemption.exempt_s} s")
    if mode == "suspend":
        parts.append("the job is stopped on its nodes and goes on later; no step is lost")
        return "; ".join(parts)
    if grace:
        signal = f" by {preemption.signal}" if preemption.signal else ""
        parts.append(
            f"{grace} s of notice{signal}: a run whose step and save fit into that loses no step"
        )
    elif grace == 0:
        parts.append(f"no notice: {NO_NOTICE}")
    else:
        parts.append(f"how long the notice is, is not documented; without one, {NO_NOTICE}")
    parts.append("SLURM puts the job back into the queue" if mode == "requeue" else RESUBMIT)
    return "; ".join(parts)


def _facts(site: Site) -> Iterator[str]:
    elsewhere = {"detect", "env", "lock"}
    rows = [
        (f"`{'.'.join(path)}`", _value(leaf.value), leaf.why, _origin(site, leaf))
        for path, leaf in site.leaves.items()
        if path[0] == schema.SETTINGS or (path[0] in schema.TABLES and path[0] not in elsewhere)
    ]
    if rows:
        yield "## Facts and defaults\n"
        yield from _table(("key", "value", "why", "source"), sorted(rows))


def _environment(site: Site) -> Iterator[str]:
    tables = list(_groups(site))
    if not tables and not site.env.unset:
        return
    yield "## Environment of the ranks\n"
    yield (
        f"`hpctrain sites show {site.name} --env --nodes 2` prints what a job of two nodes gets, "
        "with hpctrain's own flight recorder. Your own environment wins, and is reported."
    )
    for title, rows in tables:
        yield f"\n{title}:\n"
        yield from _table(("variable", "value", "why", "source"), rows)
    if site.env.unset:
        yield f"\nTaken away: {', '.join(f'`{name}`' for name in site.env.unset)}."


def _groups(site: Site) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    made = [
        (f"`{name}`", _value(value.value), f"from `network.{key}`", _origin(site, leaf))
        for key in ("socket_ifnames", "hcas")
        if (leaf := site.leaves.get(("network", key)))
        for name, value in _derived(site).items()
        if value.origin == site.where("network", key)
    ]
    if made:
        yield "Made of `[network]`", made
    for group, told in GROUPS.items():
        rows = _variables(site, ("env", group))
        if rows:
            yield f"`[env.{group}]`, {told}", rows
    for name, when in site.env.when.items():
        given = {key: getattr(when, key) for key in ("nccl", "torch", "plugin", "gpu", "nodes")}
        wanted = " and ".join(f"{key} {value}" for key, value in given.items() if value)
        yield f"Only with {wanted}", _variables(site, ("env", "when", name, "set"))


def _derived(site: Site) -> dict[str, Any]:
    return derive(site, nodes=2, versions=Versions(), run_dir="").values


def _variables(site: Site, table: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return [
        (f"`{path[-1]}`", _value(leaf.value), leaf.why, _origin(site, leaf))
        for path, leaf in site.leaves.items()
        if path[:-1] == table
    ]


def _unknown(site: Site) -> Iterator[str]:
    if site.about.stability not in {"reference", "unverified"}:
        return
    yield "## Not known: ask your admin\n"
    yield (
        "No page of the site's own that was read says this. On the cluster, `hpctrain sites init "
        "--from-slurm` answers what SLURM knows, `hpctrain sites probe` on a compute node the "
        "rest.\n"
    )
    yield from (f"- {question}" for question in [*_missing(site), *_missing_limits(site)])
    if not site.baseline.allreduce_busbw_gbs:
        yield "- `baseline`: the bandwidth of a healthy all-reduce"


def _missing(site: Site) -> Iterator[str]:
    """Facts that a run would profit from, in the schema's own words."""
    adapters = site.network.kind in {"ib", "roce"}
    for table, names in WANTED.items():
        for name in names:
            if (table, name) not in site.leaves and (name != "hcas" or adapters):
                yield f"`{table}.{name}`: {keys_of(schema.TABLES[table])[name].doc}"


def _missing_limits(site: Site) -> Iterator[str]:
    if not site.partitions:
        yield "`partitions`: their names, limits and preemption"
    for name, one in site.partitions.items():
        missing = [key for key in LIMITS if getattr(one, key) in {None, ""}]
        if one.preemption.mode == "unknown":
            missing.append("preemption")
        elif one.preemption.mode != "none" and one.preemption.grace_s is None:
            missing.append("preemption.grace_s")
        if missing:
            yield f"`partitions.{name}`: {', '.join(f'`{key}`' for key in missing)}"


def _sources(site: Site) -> Iterator[str]:
    used = {leaf.source for leaf in site.leaves.values() if leaf.source}
    if not used:
        return
    yield "## Sources\n"
    for name in sorted(used):
        yield f"- `{name}`: {site.leaves['sources', name].value}"


def _sources_below(site: Site, table: tuple[str, ...]) -> str:
    below = [leaf for path, leaf in site.leaves.items() if path[: len(table)] == table]
    return ", ".join(dict.fromkeys(f"`{leaf.source}`" for leaf in below if leaf.source))


def _origin(site: Site, leaf: PresetValue) -> str:
    """A value's source, and the base that it comes from."""
    base = Path(leaf.file).stem
    inherited = f" ({base})" if base != site.name else ""
    return f"`{leaf.source}`{inherited}" if leaf.source else inherited.strip()


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if text else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    titles = list(head)
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return lines + [f"| {' | '.join(map(_cell, row))} |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return ""
    return str(value).replace("|", r"\|")


def write() -> None:
    """Write all pages, and take those away that have no preset any more."""
    PAGES.mkdir(exist_ok=True)
    texts = pages()
    for path in PAGES.glob("*.md"):
        if path.stem not in texts:
            path.unlink()
    for name, text in texts.items():
        (PAGES / f"{name}.md").write_text(text)


if __name__ == "__main__":
    write()
