"""Tells who is about to write a secret into a run's files, without saying it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.settings.secrets import Finding


def secret_notes(found: Sequence[Finding]) -> list[str]:
    """A line for each place that names a secret."""
    lines = [
        f"{one.where}: {one.name} looks like a secret, and spec.json would hold it; "
        "leave it in your shell: it reaches the job by itself"
        for one in found
    ]
    return list(dict.fromkeys(lines))
