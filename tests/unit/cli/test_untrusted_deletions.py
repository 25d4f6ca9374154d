"""Whatever lies in a run's folder, what deletes there deletes nothing elsewhere, and says so."""

from __future__ import annotations

import os
import shutil

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.cli.main import main
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import EXIT_CODES
from hpctrain.ledger.run.layout import RunDir
from tests.support import checkpoints as support
from tests.support.fuzzing import Faults, cases, chances, odd, odd_text
from tests.support.memory import folder_in_memory

STEPS = (1000, 2000, 3000)
COMMANDS = (
    "checkpoints prune gpt-a --keep-last 1",
    "checkpoints prune gpt-a --keep-last 1 --keep-every 2000 --dry-run",
    "checkpoints rm gpt-a 1000 --yes",
    "checkpoints rm gpt-a 1000 2000 3000 --yes --force",
    "rm gpt-a -y",
)


@pytest.fixture
def folder(monkeypatch):
    """A run with three checkpoints, and what is another's."""
    with folder_in_memory() as folder:
        run = support.new_run(folder / "whole", "gpt-a")
        Spec("gpt-a", "id", 1e9, "local", "", Entry("recipe")).dump(run.spec)
        support.save(run, support.next_attempt(run), *STEPS)
        shutil.copytree(run.checkpoints, folder / "others" / "checkpoints")
        (folder / "others" / "thesis.txt").write_text("of years")
        monkeypatch.chdir(folder)
        yield folder
        monkeypatch.chdir("/")


def contents(folder):
    """Each name below a folder, and what it holds."""
    found = {}
    for where, names, files in os.walk(folder):
        found |= {f"{where}/{name}": b"" for name in names}
        for name in files:
            with open(f"{where}/{name}", "rb") as file:  # noqa: PTH123 - names may be odd
                found[f"{where}/{name}"] = file.read()
    return found


def odd_name(chance):
    """One name in a folder."""
    text = odd_text(chance).replace("/", "_").replace("\0", "")
    raw = os.fsencode(text.encode("utf-8", "replace")[:200])
    return os.fsdecode(raw) if raw not in {b"", b".", b".."} else "step-x"


def replace_by_link(path, target):
    """A link in the place of a file or folder."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    path.symlink_to(target)


def make_odd(run, others, chance):
    """One thing in the run's folder is not what it must be."""
    step = find.step_path(run, chance.choice(STEPS))
    kind = chance.randrange(8)
    if step.is_symlink():
        return  # what is below it is another's
    if kind == 0:
        replace_by_link(step, chance.choice(sorted((others / "checkpoints").iterdir())))
    elif kind == 1 and step.is_dir():
        replace_by_link(chance.choice(sorted(step.iterdir())), others / "thesis.txt")
    elif kind == 2 and step.is_dir():
        (step / odd_name(chance)).symlink_to(chance.choice((others, others / "thesis.txt")))
    elif kind == 3:
        (run.checkpoints / odd_name(chance)).symlink_to(others / "checkpoints")
    elif kind == 4:
        prefix = chance.choice(("step-", ".staged-", "torn-", ".removed-", "step-0000002000-"))
        (run.checkpoints / (prefix + odd_name(chance))[:250]).symlink_to(others)
    elif kind == 5:
        replace_by_link(run.root / chance.choice(("spec.json", "events.jsonl")), others)
    elif kind == 6:
        (run.root / odd_name(chance)).symlink_to(others)
    else:
        path = chance.choice(sorted(step.iterdir())) if step.is_dir() else run.spec
        path.unlink()
        path.write_text(str(odd(chance)).encode("utf-8", "replace").decode())


def tried(faults, what, words, capsys):
    def call():
        code = main(words.split())
        out, err = capsys.readouterr()
        assert code in EXIT_CODES, f"exit code {code}"
        assert "Traceback" not in out + err
        assert code == 0 or err

    faults.of(f"{what}: {words}", call)


@cases(short=20, long=2500)
def test_nothing_is_deleted_beside_the_run(folder, capsys, begin, end):
    faults, others = Faults(), folder / "others"
    before = contents(others)
    for number, chance in chances(begin, end):
        shutil.copytree(folder / "whole" / "runs", folder / "runs")
        run = RunDir(folder / "runs" / "gpt-a")
        for _ in range(chance.choice((1, 1, 2, 4))):
            try:
                make_odd(run, others, chance)
            except (FileNotFoundError, FileExistsError, NotADirectoryError):
                break  # odd already
        for words in COMMANDS:
            tried(faults, f"case {number}", words, capsys)
            assert contents(others) == before, (number, words)
        shutil.rmtree(folder / "runs")
    assert faults.found == []
