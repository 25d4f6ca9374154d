"""A user's ds_config.json, read and checked when a run is prepared, so that the run is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import NotFound, UsageError
from hpctrain.plan.deepspeed import check_user_config
from hpctrain.plan.ds_config import is_text, read_user_config, resolve_ds_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.settings.schema import Settings


def take_ds_config(
    settings: Settings, cwd: Path, *, is_recipe: bool, data_ranks: Sequence[int]
) -> list[str]:
    """Put the file's text in the place of its path in `engine.ds_config`, checked.

    Args:
        settings: Checked otherwise; changed in place.
        cwd: What the path is relative to.
        is_recipe: The shipped recipe runs, so that its batch sizes are known.
        data_ranks: At the fewest and at the most nodes.

    Returns:
        What has no effect, for the user to read.

    Raises:
        NotFound: there is no such file.
        UsageError: it cannot be read, is not one, or contradicts the settings.
    """
    value = settings.engine.ds_config
    if not value:
        return []

    def read(path: str) -> str:
        try:
            return (cwd / path).expanduser().read_text(encoding="utf-8")
        except FileNotFoundError:
            raise NotFound(f"{path} (engine.ds_config) is not there; check the path") from None
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8 text"
            raise UsageError(f"{path} (engine.ds_config) cannot be read: {why}") from None

    text = resolve_ds_config(value, read)
    where = "engine.ds_config" if is_text(value) else value
    train = settings.train if is_recipe else None
    notes = check_user_config(
        read_user_config(text, where),
        settings.engine,
        train=train,
        data_ranks=data_ranks,
        where=where,
    )
    settings.engine.ds_config = text
    return notes
