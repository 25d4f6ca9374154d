"""Print what hpctrain adds at 64 to 16,384 ranks, each with its law, and real points beside them.

    python -m benchmarks.scale [--quick]

`--quick` takes the constants as they were measured, and runs no real point.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.scale import anchors, model

RANKS = (64, 256, 1024, 4096, 8192, 16384)
ANCHORED = 8192


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description="What hpctrain adds, by ranks.")
    parser.add_argument("--quick", action="store_true", help="no real points")
    quick = parser.parse_args().quick
    given = model.constants()
    if not quick:
        given = replace(given, hop_s=anchors.hop_s(), look_s=anchors.look_s(ANCHORED))
        print(f"measured now: hop {given.hop_s * 1e6:.0f} us, look {given.look_s * 1e6:.1f} us")
    for name, law, values in rows(given):
        print(f"{name:44} {' '.join(f'{value:>9}' for value in values)}  {law}")
    if not quick:
        seconds, megabytes = anchors.status_s(ANCHORED)
        said = model.status_s(ANCHORED, given, shared=False)
        print(
            f"status of {ANCHORED:,} ranks, {megabytes:.0f} MB: {seconds:.2f} s; law {said:.2f} s"
        )


def rows(given: model.Constants) -> list[tuple[str, str, list[str]]]:
    """Name, law, and a value for each number of ranks."""

    def row(name: str, law: str, values: list[str]) -> tuple[str, str, list[str]]:
        return name, law, values

    def counts(values: list[float]) -> list[str]:
        return [f"{value:,.0f}" for value in values]

    def seconds(values: list[float]) -> list[str]:
        return [f"{value:.3g}" for value in values]

    shared = "a server's look is thought"
    return [
        row("ranks", "", [f"{ranks:,}" for ranks in RANKS]),
        row(
            "agreement, s",
            "2 x depth of the tree x (hop + fan-out x merge); network thought",
            seconds([model.agreement_s(ranks, given) for ranks in RANKS]),
        ),
        row(
            "start, operations on the run's directory",
            "a + b x ranks + c x nodes",
            counts([model.start_operations(ranks, given) for ranks in RANKS]),
        ),
        row(
            "start, on an environment that is not staged",
            "c x nodes + b x ranks",
            counts([model.import_operations(ranks, given) for ranks in RANKS]),
        ),
        row(
            "save, operations",
            "a + b x ranks",
            counts([model.save_operations(ranks, given) for ranks in RANKS]),
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
            counts([model.resume_operations(ranks, given) for ranks in RANKS]),
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
