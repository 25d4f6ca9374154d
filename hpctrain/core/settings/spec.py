"""spec.json: a run's resolved settings, each with its origin; submit writes it, all others read.

What in it looks like a secret is found by its name, or because a URL has a password in it. Names of
tokens that are counted, of tokenizers and of files are none. tests/unit/submit/test_prepare.py and
tests/unit/settings/test_secrets.py hold the promises.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.core.base.files import read_plain, write_private
from hpctrain.core.settings.fields import make
from hpctrain.core.settings.layers import DEFAULT
from hpctrain.core.settings.schema import (
    REMOVED,
    RENAMED,
    Settings,
    current_name,
    replaced,
    sections,
    value_at,
)
from hpctrain.errors import HpctrainError, NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


FORMAT = 3
"""Lower numbers are hpctrain 0.1.0's."""


@dataclass
class Entry:
    """What the ranks run."""

    kind: str
    """"recipe", "script" (a file of Python), "module" (as `python -m` runs it) or "program"."""
    path: str = ""
    """Absolute path of the file as submitted (inside the snapshot where there is one)."""
    module: str = ""
    """Its name, of a module."""
    local_rank: str = ""
    """Option with which each rank gets its number on the node, in front of `args`."""
    args: list[str] = field(default_factory=list)
    cwd: str = ""
    """The ranks' working directory: where `submit` was called, so that relative paths hold."""
    python_path: list[str] = field(default_factory=list)
    """Put in front of PYTHONPATH: the snapshot's counterparts of the checkout's entries; for a
    module the working directory, or its counterpart."""


@dataclass
class Snapshot:
    """The code that runs is the code that was submitted."""

    commit: str
    dirty: bool
    files: int
    size_bytes: int
    root: str = ""
    """The checkout that was copied."""


@dataclass
class Evaluates:
    """Which checkpoint a run evaluates."""

    run: str
    """Absolute path of the run that has it."""
    step: int
    checkpoint: str
    """Its folder."""


@dataclass
class Spec:
    """One run, fully resolved."""

    name: str
    run_id: str
    """Random; stable over requeues and resumes (trackers use it)."""
    created: float
    cluster: str
    """"slurm" or "local"."""
    site: str
    entry: Entry
    settings: Settings = field(default_factory=Settings)
    origins: dict[str, str] = field(default_factory=dict)
    """Setting to origin: "default", "flag --nodes", "hpctrain.toml:3", "site x (.../x.toml:7)"."""
    chosen: list[str] = field(default_factory=list)
    """Settings that nobody has given, for which submit chose a value; its layer lies on top."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the ranks that hpctrain.toml and flags set; the preset's is derived for each
    attempt. No secrets: see `submit`."""
    env_origins: dict[str, str] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    dropped_env: list[str] = field(default_factory=list)
    """SBATCH_*/SLURM_* variables of the submitting shell that were not passed on."""
    python: str = ""
    """The interpreter that the job uses."""
    preset: dict[str, Any] | None = None
    """The site's preset as it was at submit (`Site.as_plain`), which holds in jobs and at a resume
    whatever the files say by then; None without a site."""
    unlocked: list[str] = field(default_factory=list)
    """Locked keys of the preset that the user changed with --allow-locked."""
    beside: dict[str, Entry] = field(default_factory=dict)
    """Programs of jobs beside this run, by the section that names them: "evaluate"."""
    evaluates: Evaluates | None = None
    """Of a run that evaluates a checkpoint of another."""
    after: list[str] = field(default_factory=list)
    """Absolute paths of the runs that must be done before this one starts."""
    foreign: bool = False
    """Whether the user has asked for this run although others own its code (--foreign)."""
    format: int = FORMAT

    def command(self) -> list[str]:
        """What each rank runs, as one would type it."""
        entry = self.entry
        what = {
            "recipe": [self.python, "-m", "hpctrain.recipes.lm.train"],
            "module": [self.python, "-m", entry.module],
            "program": [entry.path],
        }
        local_rank = [f"{entry.local_rank}=$LOCAL_RANK"] if entry.local_rank else []
        return [*what.get(entry.kind, [self.python, entry.path]), *local_rank, *entry.args]

    def given(self) -> tuple[Settings, dict[str, str]]:
        """Settings and origins without the layer of what was chosen: defaults are below it."""
        below = {path: value_at(Settings(), path) for path in self.chosen}
        return replaced(self.settings, below), self.origins | dict.fromkeys(self.chosen, DEFAULT)

    def dump(self, path: Path) -> None:
        """Write spec.json, whole or not at all; nobody else can write it, nor read it."""
        write_private(path, json.dumps(asdict(self), indent=1) + "\n")


def load_spec(path: Path) -> Spec:
    """Read spec.json.

    Raises:
        NotFound: there is none, or it has the format of another version.
        UsageError: it is no spec: torn, or written by something else.
    """
    try:
        text = read_plain(path)
    except FileNotFoundError:
        raise NotFound(f"{path} is not there: {path.parent} is not a run's directory") from None
    return parse_spec(text, path)


def spec_or_why(path: Path) -> tuple[Spec | None, str]:
    """What spec.json says, or why it cannot be read."""
    try:
        return load_spec(path), ""
    except HpctrainError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror or error}"


def _known(section: str, given: dict[str, Any]) -> dict[str, Any]:
    keys = given.get(section, {}).items()
    return {
        current_name(section, key): value
        for key, value in keys
        if f"{section}.{key}" not in REMOVED
    }


def parse_spec(text: str | bytes, path: Path) -> Spec:
    """What spec.json says, which was read elsewhere.

    Raises:
        NotFound: it has the format of another version.
        UsageError: it is no spec: torn, or written by something else.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw["format"] > FORMAT:
            raise NotFound(
                f"{path} has format {raw['format']}, this hpctrain reads up to {FORMAT}; "
                "use a newer hpctrain"
            )
        if raw["format"] < FORMAT:
            raise NotFound(
                f"{path} has format {raw['format']}, this hpctrain reads format {FORMAT} alone; "
                "hpctrain 0.1.0 shows and resumes this run"
            )
        raw["entry"] = Entry(**raw["entry"])
        raw["snapshot"] = Snapshot(**raw["snapshot"]) if raw["snapshot"] else None
        raw["beside"] = {at: Entry(**entry) for at, entry in raw.get("beside", {}).items()}
        raw["evaluates"] = Evaluates(**raw["evaluates"]) if raw.get("evaluates") else None
        given = raw["settings"]
        raw["settings"] = make(Settings, {name: _known(name, given) for name in sections()})
        raw["origins"] = {
            RENAMED.get(at, at): why for at, why in raw["origins"].items() if at not in REMOVED
        }
        raw["chosen"] = [RENAMED.get(at, at) for at in raw.get("chosen", [])]
        return Spec(**raw)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} cannot be read: it is not the spec of a run ({why})") from None


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

    Any KEY of a variable is one; among options there are many of other kinds.
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
    """All that a run's spec.json would hold of secrets."""
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
