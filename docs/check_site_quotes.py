"""Holds presets against the quotes of their pages: `python docs/check_site_quotes.py`.

site-configs/sources/NAME.toml has lines of each page that NAME.toml is made from, with the keys
that they prove. Four ways:

- `proves`: the value itself stands in the line; of a list each item, of a table each key and value.
- `lasts`: key to words of the line that are the same time ("12 hours" for "12:00:00").
- `means`: key to words of the line that say the value otherwise, and the value that they say
  (["is mandatory", true]). Several lines may each say a part of a list or of a table.
- `masks`: the line has one hexadecimal CPU mask for each item of a list of CPUs.

`cells` is for a stored copy that ran the cells of a table together: they make up a part of the
line, and `proves` looks at them instead.

A value without a line, a line that does not have what it proves, a line of another page than the
value's source, and a key that the preset has not are errors. What a preset has from a base is the
base's to prove.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from hpctrain.cluster.site.validate import seconds
from hpctrain.node.agent.cpus import cpus_of

PRESETS = Path(__file__).parents[1] / "site-configs"
SOURCES = PRESETS / "sources"
UNITS_S = {
    "sec": 1, "second": 1, "min": 60, "minute": 60,
    "h": 3600, "hr": 3600, "hour": 3600, "d": 86400, "day": 86400,
}  # fmt: skip
ABOUT = {"schema", "name", "description", "contact", "url", "reviewed", "stability", "extends"}


def problems(preset: dict[str, Any], pages: dict[str, Any]) -> list[str]:
    """What does not hold; empty where every value has a line that has it.

    Args:
        preset: NAME.toml as TOML reads it.
        pages: sources/NAME.toml, the same.
    """
    values = {key: value for key, value, _ in _values(preset)}
    sources = {key: source for key, _, source in _values(preset)}
    found: list[str] = []
    proved: set[str] = set()
    for page, told in pages.items():
        if page not in preset.get("sources", {}):
            found.append(f"{page} is no source of the preset")
        if not told.get("url") or not told.get("read"):
            found.append(f"{page} lacks its url or the day on which it was read")
        for quote in told["quotes"]:
            for key, why in _of_quote(quote, values):
                proved.add(key)
                if why:
                    found.append(f"{page}: {key} {why}")
                elif sources[key] != page:
                    found.append(
                        f"{page}: {key} has the source {sources[key]}, and this is another page"
                    )
    found += [
        f"{key} is {values[key]!r}, and its lines say {parts}"
        for key, parts in _read_as(pages).items()
        if key in values and not _are(parts, values[key])
    ]
    return found + [f"{key} has no line that proves it" for key in values if key not in proved]


def _of_quote(quote: dict[str, Any], values: dict[str, Any]) -> list[tuple[str, str]]:
    """Each key of a quote, with what is wrong; "" where it holds."""
    text, apart = quote["text"], _apart(quote)
    found = []
    for key in quote.get("proves", []):
        missing = [one for one in _words(values.get(key, "")) if not _stands_in(one, apart)]
        found.append((key, f"is {missing}, which the line has not" if missing else ""))
    for key, words in quote.get("lasts", {}).items():
        told = _lasts(words) if _stands_in(words, text) else None
        same = told is not None and told == _lasts(values.get(key))
        found.append((key, "" if same else f"is not {words!r}, or the line has not that"))
    for key, (words, _) in quote.get("means", {}).items():
        found.append((key, "" if words in text else f"is said by {words!r}, not of the line"))
    for key in quote.get("masks", []):
        masks = [int(mask, 16) for mask in re.findall(r"(?:0x|\b)([0-9a-f]{2,})\b", text)]
        masked = [{cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1} for mask in masks]
        here = [set(cpus_of(item)) for item in values.get(key, [])]
        found.append((key, "" if here == masked else "is not what the masks say"))
    return [(key, why if key in values else "is no value of the preset") for key, why in found]


def _apart(quote: dict[str, Any]) -> str:
    """The line, or its cells apart; nothing where they are not the line's."""
    cells, text = quote.get("cells", []), str(quote["text"])
    if not cells:
        return text
    return " | ".join(cells) if "".join("".join(cells).split()) in "".join(text.split()) else ""


def _lasts(time: Any) -> int | None:
    """Seconds of a value, or of words like "12 hours"; None where it is no time."""
    said = re.fullmatch(r"(\d+) ?([a-z]+?)s?", str(time))
    if said:
        return int(said[1]) * UNITS_S[said[2]] if said[2] in UNITS_S else None
    return time if isinstance(time, int) else seconds(str(time))


def _read_as(pages: dict[str, Any]) -> dict[str, list[Any]]:
    """The value or its parts by key, as each line that `means` them was read."""
    found: dict[str, list[Any]] = {}
    for told in pages.values():
        for quote in told["quotes"]:
            for key, (_, value) in quote.get("means", {}).items():
                found.setdefault(key, []).append(value)
    return found


def _are(parts: list[Any], value: Any) -> bool:
    """Whether the lines say the value; lists (in order) and tables may come in parts."""
    if isinstance(value, list) and all(isinstance(part, list) for part in parts):
        return [one for part in parts for one in part] == value
    if isinstance(value, dict) and all(isinstance(part, dict) for part in parts):
        return {key: one for part in parts for key, one in part.items()} == value
    return all(part == value for part in parts)


def _words(value: Any) -> list[str]:
    """What must stand in a line for a value."""
    if isinstance(value, dict):
        return [word for pair in value.items() for one in pair for word in _words(one)]
    if isinstance(value, list):
        return [word for one in value for word in _words(one)]
    return [str(value)]


def _stands_in(word: str, text: str) -> bool:
    """As a word of its own: 8 does not stand in 128."""
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w])", text) is not None


def _values(
    table: dict[str, Any], path: tuple[str, ...] = (), above: str = ""
) -> list[tuple[str, Any, str]]:
    """Every value of a preset by its path, with its source; without what says who the preset is."""
    found: list[tuple[str, Any, str]] = []
    source = str(table.get("source", above))
    for key, value in table.items():
        at = (*path, key)
        if key in {"source", "why", "description"} or at[0] == "sources":
            continue
        if len(at) == 1 and key in ABOUT:
            continue
        if isinstance(value, dict) and "value" in value:
            found.append((".".join(at), value["value"], str(value.get("source", source))))
        elif isinstance(value, dict) and not _is_leaf(at):
            found += _values(value, at, source)
        else:
            found.append((".".join(at), value, source))
    return found


def _is_leaf(path: tuple[str, ...]) -> bool:
    """Tables that are one value."""
    return path[-1] in {"allreduce_busbw_gbs", "walltime_bins"}


def main() -> int:
    """Print what does not hold; 1 where something does not."""
    failed = 0
    for path in sorted(SOURCES.glob("*.toml")):
        preset = tomllib.loads((PRESETS / path.name).read_text())
        for line in problems(preset, tomllib.loads(path.read_text())):
            print(f"{path.stem}: {line}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
