"""How Sphinx builds the pages of this folder as a site; `make docs` calls it.

Needs no network. The pages stay readable without it: what Sphinx alone needs stands in index.md,
in api.md and here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "hpctrain"
author = "The authors of hpctrain"
version = release = __version__
html_theme = "furo"
html_title = f"hpctrain {__version__}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4  # links to headings are checked too, those to rules of lint among them

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch's own documentation is not ours to build
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"  # docstrings are read in the terminal first: `name` there is code

# A type without an entry is a mistake, but for these: what Python, numpy and torch have is
# described elsewhere, and finding it there would take the network; the rest a program passes on.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(np|npt|nn|os|pathlib|torch)\..*|AbstractContextManager|Optimizer|Path"),
    (
        r"py:.*",
        r"Loss|LossScale|State|Auditing|UpdateGuard|program_state\.\w+|TensorEntry|Exchange",
    ),
    (
        r"py:.*",
        r"EndReason|Next|Skipped|Failure|EndCause|RanksAwaited|HangSuspected|HangFound|StragglerFound",
    ),  # of an AttemptView
    (r"py:class", r"Mapping\[str"),  # Sphinx splits a signature at commas where a default is made
]


def add_presets(_: Sphinx, page: str, source: list[str]) -> None:
    """Put the presets' pages below their index, whose text is a list of links already."""
    if page == "sites/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def keep_colons(_: Sphinx, what: str, *others: Any) -> None:
    """Keep napoleon from taking what stands before an attribute's first colon for its type."""
    lines: list[str] = others[-1]
    if what in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]  # an empty comment, which has no colon


def setup(app: Sphinx) -> None:
    """Connect what is done to the pages' text and to docstrings."""
    app.connect("source-read", add_presets)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon's
