"""The argument for a site's name, and its completion.

tests/unit/cli/test_sites.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    _Function = TypeVar("_Function", bound=Callable[..., Any])


def site_argument(function: _Function) -> _Function:
    """`NAME`: a site's name, or the path of its .toml file."""
    return click.argument("name", shell_complete=complete_site)(function)


def complete_site(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Sites whose names begin so; files where it looks like a path."""
    from click.shell_completion import CompletionItem

    from hpctrain.errors import HpctrainError
    from hpctrain.site.load import site_names

    if "/" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="file")]
    try:
        names = site_names()
    except HpctrainError:  # a completion has nowhere to say what is wrong
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
