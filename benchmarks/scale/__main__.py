"""Print what hpctrain adds at 64 to 16,384 ranks, each with its law, and real points beside them.

    python -m benchmarks.scale [--quick]
    python -m benchmarks.scale --run agreement|nodes|meeting|checkpoint [--sizes N ...]

`--quick` takes the constants as they were measured, and runs no real point. `--run` runs real
points alone, some minutes of them, and writes them into constants.toml with date, commit and load.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.scale import anchors, laws, model, points

if TYPE_CHECKING:
    from collections.abc import Callable

    ByRanks = Callable[[int, model.Constants], float]
    """So many ranks and the constants to seconds, or to operations."""

RUNS = {
    "agreement": (16, 64, 128, 256, 512),
    "nodes": (64, 250, 1000),
    "meeting": (64, 500, 1000, 2000),
    "checkpoint": (1024, 4096, 16384),
}
"""What can be run, and at which sizes: ranks, nodes, agents, ranks."""
RANKS = (64, 256, 1024, 4096, 8192, 16384)
ANCHORED = 8192
FOUR = 512
"""From so many ranks on a tree with 4 children each has three levels."""


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description="What hpctrain adds, by ranks.")
    parser.add_argument("--quick", action="store_true", help="no real points")
    parser.add_argument("--run", choices=RUNS, help="real points of this alone; write them down")
    parser.add_argument("--sizes", type=int, nargs="+", help="in place of the usual ones")
    asked = parser.parse_args()
    if asked.run:
        for size in asked.sizes or RUNS[asked.run]:
            run(asked.run, size)
        return
    quick = asked.quick
    given = model.constants()
    if not quick:
        from benchmarks.scale.tree import hop_s

        given = replace(given, control_hop_s=hop_s(), look_s=anchors.look_s(ANCHORED))
        hop_us, look_us = given.control_hop_s * 1e6, given.look_s * 1e6
        print(f"measured now: hop {hop_us:.0f} us, look {look_us:.1f} us")
    for name, law, values in rows(given):
        print(f"{name:44} {' '.join(f'{value:>9}' for value in values)}  {law}")
    print("\nReal points beside their laws:")
    for line in beside(given):
        print(line)
    if not quick:
        seconds, megabytes = anchors.status_s(ANCHORED)
        said = model.status_s(ANCHORED, given, shared=False)
        print(
            f"status of {ANCHORED:,} ranks, {megabytes:.0f} MB: {seconds:.2f} s; law {said:.2f} s"
        )


def run(name: str, size: int) -> None:
    """One real point, or two of a tree of many nodes: 32 children each, and 4 in three levels."""
    if name == "agreement":
        from benchmarks.scale.tree import agreement

        measured: list[Any] = [agreement(size)] + ([agreement(size, 4)] if size >= FOUR else [])
    elif name == "nodes":
        from benchmarks.scale.agents import many_nodes

        measured = [many_nodes(size)]
    elif name == "meeting":
        from benchmarks.scale.stores import meeting

        measured = [meeting(size)]
    else:
        from benchmarks.scale.large_checkpoint import large_checkpoint

        measured = [large_checkpoint(size)]
    for point in measured:
        print(point, flush=True)
        points.record(name, point)


def beside(given: model.Constants) -> list[str]:
    """Each point that was run, beside what its law says, and the factor between them."""
    lines = []
    for anchor in laws.ANCHORS:
        lines.append(f"{anchor.of} {anchor.field}: {anchor.form}")
        for point in points.points(anchor.of):
            ran, said = point[anchor.field], anchor.law(point, given)
            busy = "; an upper bound" if anchor.is_bound(point) else ""
            size = " ".join(f"{point[name]:,} {name}" for name in points.SIZES if name in point)
            lines.append(f"  {size:32} {ran:9.3g}  law {said:9.3g}  x {ran / said:.2f}{busy}")
    return lines


def rows(given: model.Constants) -> list[tuple[str, str, list[str]]]:
    """Name, law, and a value for each number of ranks."""

    def row(name: str, law: str, values: list[str]) -> tuple[str, str, list[str]]:
        return name, law, values

    def counts(values: list[float]) -> list[str]:
        return [f"{value:,.0f}" for value in values]

    def seconds(values: list[float]) -> list[str]:
        return [f"{value:.3g}" for value in values]

    def counted(law: ByRanks) -> list[str]:
        return counts([law(ranks, given) for ranks in RANKS])

    def timed(law: ByRanks) -> list[str]:
        return seconds([law(ranks, given) for ranks in RANKS])

    agents = [model.nodes(ranks) for ranks in RANKS]
    below = [model.depth(number) for number in agents]
    shared = "a server's look is thought"
    return [
        row("ranks", "", [f"{ranks:,}" for ranks in RANKS]),
        row(
            "notice to agreed stop, s",
            "step + max(50 ms, 3 x levels x (2 x hop + 10 ms))",
            seconds([laws.notice_s(levels, given) for levels in below]),
        ),
        row(
            "commit: gather, table, rename, s",
            "a + b x ranks + levels x hop; this disk",
            timed(laws.commit_s),
        ),
        row(
            "choose among 20, tell, read the table, s",
            "a + b x ranks + (levels + 1) x (hop + 32 x message)",
            timed(laws.restore_s),
        ),
        row(
            "choose where 19 of 20 are torn, s",
            "a + b x ranks",
            timed(laws.choose_torn_s),
        ),
        row(
            "agents meet and learn their ranks, s",
            "agents x (connection + name + call)",
            seconds([laws.meet_s(n, given) + laws.ranks_s(n, given) for n in agents]),
        ),
        row(
            "start: meet, tree, choose, s",
            "the sum; without imports and torch's meeting",
            timed(laws.start_s),
        ),
        row(
            "the store's process in training, cores",
            "agents x looks, each agents x 1 ms apart",
            seconds([laws.store_cpu(n, given) for n in agents]),
        ),
        row(
            "node 0's control process, cores",
            "a + b x children, steps of 20 ms",
            seconds([laws.root_cpu(min(n - 1, model.FAN_OUT), given) for n in agents]),
        ),
        row(
            "start, operations on the run's directory",
            "a + b x ranks + c x nodes",
            counted(model.start_operations),
        ),
        row(
            "start, on an environment that is not staged",
            "c x nodes + b x ranks",
            counted(model.import_operations),
        ),
        row(
            "save, operations",
            "a + b x ranks",
            counted(model.save_operations),
        ),
        row(
            "looks before the rename, this disk, s",
            "a listing and a sample of files",
            seconds([model.looks_of_commit_s(ranks, given, shared=False) for ranks in RANKS]),
        ),
        row(
            "the same, a shared file system, s",
            shared,
            seconds([model.looks_of_commit_s(ranks, given, shared=True) for ranks in RANKS]),
        ),
        row(
            "looks at what is chosen, a shared one, s",
            "ranks x look / lookers; " + shared,
            seconds([model.looks_of_choice_s(ranks, given, shared=True) for ranks in RANKS]),
        ),
        row(
            "resume, operations",
            "a + b x ranks",
            counted(model.resume_operations),
        ),
        row(
            "status of 30 days, this disk, s",
            "base + MB x parse + a sample's looks",
            seconds([model.status_s(ranks, given, shared=False) for ranks in RANKS]),
        ),
        row(
            "the same, a shared file system, s",
            shared,
            seconds([model.status_s(ranks, given, shared=True) for ranks in RANKS]),
        ),
        row(
            "samples of ranks in 30 days, MB",
            "the code's own rule",
            seconds([model.samples_bytes(ranks) / 1e6 for ranks in RANKS]),
        ),
        row(
            "ledger in 30 days, MB",
            "marks a minute, none by ranks",
            seconds([model.ledger_bytes(30) / 1e6 for _ in RANKS]),
        ),
    ]


if __name__ == "__main__":
    main()
