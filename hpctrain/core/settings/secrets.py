"""What in settings looks like a secret, and would be written down where a run's files are. Pure.

By its name, or because a URL has a password in it. Names of tokens that are counted, of tokenizers
and of files are none. tests/unit/settings/test_secrets.py holds the promises.
"""

from __future__ import annotations

import re
import shlex
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Spec

HIDDEN = "***"
_SHORT = 8
"""Characters; a shorter value may be a part of other words."""
_ENDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "APIKEY", "ACCESSKEY", "AUTHKEY")
_KEYS = frozenset({"API", "ACCESS", "SECRET", "PRIVATE", "AUTH", "ACCOUNT", "ENCRYPTION"})
_ELSEWHERE = frozenset({"PATH", "FILE", "DIR", "FOLDER", "ID", "NAME", "COUNT", "LENGTH"})
_ORDINARY = re.compile(r"[\d.,_+-]*|true|false|yes|no|none|auto", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/\s:@]*:(?P<password>[^/\s@]+)@")
_SET = re.compile(r"(?<![\w-])(?P<name>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s;&|]+)")


class SecretFinding(NamedTuple):
    """Something that looks like a secret."""

    where: str
    """The setting, or the place in it."""
    name: str
    value: str


def is_secret_name(name: str, *, variable: bool = True) -> bool:
    """Whether a variable's or an option's name is one of a secret.

    Args:
        name: `WANDB_API_KEY`, `--api-key`.
        variable: Any KEY of a variable is one; among options there are many of other kinds.
    """
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word]
    if not words or words[-1] in _ELSEWHERE:
        return False
    if any(word.endswith(_ENDS) for word in words):
        return True
    keyed = [n for n, word in enumerate(words) if word == "KEY"]
    return any(variable or (n > 0 and words[n - 1] in _KEYS) for n in keyed)


def secrets_of(
    settings: Settings,
    env: Mapping[str, str],
    args: Sequence[str],
    *,
    env_origins: Mapping[str, str],
    origins: Mapping[str, str],
) -> list[SecretFinding]:
    """All that a run's spec.json would hold of secrets.

    Args:
        settings: The run's.
        env: Variables that the user sets for the ranks.
        args: The script's arguments.
        env_origins: Variable to its place.
        origins: Setting to its place.
    """
    secrets = []
    for name, value in env.items():
        where = env_origins.get(name, "env")
        secrets += _of_pair(where, name, value) or _of_urls(where, name, value)
    secrets += _of_words("an argument of the script", args)
    where = f"{origins.get('run.resume_args', 'default')}: run.resume_args"
    secrets += _of_words(where, _split(settings.run.resume_args))
    texts = [("slurm.setup", line) for line in settings.slurm.setup]
    texts += [("container.env", line) for line in settings.container.env]
    texts.append(("notify.command", settings.notify.command))
    for path, text in texts:
        where = f"{origins.get(path, 'default')}: {path}"
        secrets += [
            secret
            for match in _SET.finditer(text)
            for secret in _of_pair(where, match["name"], match["value"].strip("\"'"))
        ]
        secrets += _of_words(where, _split(text))
    return list(dict.fromkeys(secrets))


def secrets_in(spec: Spec) -> list[SecretFinding]:
    """All secrets of a run's spec.json."""
    return secrets_of(
        spec.settings,
        spec.env,
        spec.entry.args,
        env_origins=spec.env_origins,
        origins=spec.origins,
    )


def hide(value: object, secrets: Sequence[SecretFinding]) -> object:
    """The same JSON value, with every secret in its texts replaced."""
    if isinstance(value, str):
        for secret in sorted(secrets, key=lambda secret: -len(secret.value)):
            whole = re.escape(secret.value)
            if len(secret.value) < _SHORT:  # else parts of ordinary words would go too
                whole = rf"(?<!\w){whole}(?!\w)"
            value = re.sub(whole, HIDDEN, value)
        return value
    if isinstance(value, dict):
        return {key: hide(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide(item, secrets) for item in value]
    return value


def secret_warnings(findings: Sequence[SecretFinding]) -> list[str]:
    """A line for each place that names a secret; the secret is in none."""
    lines = [
        f"{one.where}: {one.name} looks like a secret, and spec.json would hold it; "
        "leave it in your shell: it reaches the job by itself"
        for one in findings
    ]
    return list(dict.fromkeys(lines))


def _of_pair(where: str, name: str, value: str, *, variable: bool = True) -> list[SecretFinding]:
    is_one = (
        is_secret_name(name, variable=variable)
        and not _ORDINARY.fullmatch(value)
        and not value.startswith(("$", "/", "~", "-"))  # another variable's, a file, an option
    )
    return [SecretFinding(where, name, value)] if is_one else []


def _of_urls(where: str, name: str, text: str) -> list[SecretFinding]:
    return [SecretFinding(where, name, match["password"]) for match in _URL.finditer(text)]


def _of_words(where: str, words: Sequence[str]) -> list[SecretFinding]:
    return [one for name, value in _options(words) for one in _of_option(where, name, value)]


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Option and value; the name of what is none is ""."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            yield "", word
        elif equals:
            yield name, value
        else:
            yield name, "" if following.startswith("-") else following


def _of_option(where: str, name: str, value: str) -> list[SecretFinding]:
    named = _of_pair(where, name, value, variable=False) if name else []
    return named or _of_urls(where, name or "a URL's password", value)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an open quote
        return line.split()
