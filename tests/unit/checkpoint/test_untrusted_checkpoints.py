"""Manifests and chunk tables that prove themselves and hold what nobody meant: no traceback.

Their digests are right, so every reader takes them for whole until it looks at the values. Every
command that reads a checkpoint, and the choice of one, ends in a line and a code that are known.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys

import numpy as np
import pytest

from hpctrain.checkpoint.format import index, table
from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, TABLE_NAME, bytes_digest
from hpctrain.checkpoint.store import find
from hpctrain.cli.main import main
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import EXIT_CODES, HpctrainError
from hpctrain.ledger.run.layout import RunDir
from tests.support import checkpoints as support
from tests.support.fuzzing import Faults, cases, chances, odd
from tests.support.memory import folder_in_memory

GOOD, ODD = 1000, 2000
COMMANDS = {
    "list": "checkpoints list gpt-a",
    "list --json": "checkpoints list gpt-a --json",
    "verify": f"checkpoints verify gpt-a {ODD}",
    "verify --deep": f"checkpoints verify gpt-a --deep {ODD} --threads 1",
    "export": f"checkpoints export gpt-a {ODD} out --what all",
    "import": f"checkpoints import runs/gpt-a/checkpoints/step-{ODD:010d} --run gpt-b --step 7",
    "pin": f"checkpoints pin gpt-a {ODD}",
    "prune": "checkpoints prune gpt-a --keep-last 1 --keep-best 1 --metric loss --dry-run",
    "status": "status gpt-a",
    "resume": "resume gpt-a --dry-run",
    "unpin": f"checkpoints pin gpt-a {ODD} --remove",
    "rm": f"checkpoints rm gpt-a {ODD} --yes",
}
NUMBERS = (0, 1, 2, 255, 256, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
BLOCKS = (0, -1, "x", 1, 3, 2**20, 2**26, 2**31, 2**40, 2**63, 2**64, 1.5, True, None, [512])
TIMES = ("x", math.nan, math.inf, 1e308, -1, -1e18, 2**63, 1e18, True, [], 253402300800)
TEXTS = (
    "F32[-1]", "F32[]", "F32[0]", "F32[9223372036854775808]", "F99[1]", "F32[4611686018427387904]",
    "F32[" + "1," * 70 + "1]", "F32[" + "9" * 5000 + "]", "F32[96,16", "", "BOOL[1536]",
    "F32[4294967296,4294967296,4294967296]", "F64[96,16]", "F32[16,96]", "F32[1536]",
)  # fmt: skip
opened = []
"""Files that were opened beside the case's own folder."""


def _watch(event, args):
    if event == "open" and "canary" in str(args[0]):
        opened.append(str(args[0]))


@pytest.fixture(scope="module")
def before():
    """A run with two checkpoints, and an empty one to import into."""
    # Not as this file is read: a hook stays for the process, and torch's compiler in another file's
    # tests would count it among what it compiles.
    sys.addaudithook(_watch)
    with folder_in_memory() as folder:
        for name in ("gpt-a", "gpt-b"):
            run = support.new_run(folder / "case", name)
            Spec(name, f"id-{name}", 1e9, "local", "", Entry("recipe")).dump(run.spec)
        run = RunDir(folder / "case" / "runs" / "gpt-a")
        support.save(run, support.next_attempt(run), GOOD, ODD)
        for path in run.checkpoints.iterdir():
            seal(path, read(path) | {"metrics": {"loss": 1.0}})
        (folder / "canary").write_text("nobody reads this")
        opened.clear()
        yield folder


@pytest.fixture
def case(before, monkeypatch, request):
    """`case()`: a fresh copy of it, the working directory of what follows."""
    number = iter(range(10**9))

    def fresh():
        folder = before / f"{abs(hash(request.node.name))}-{next(number)}"
        shutil.copytree(before / "case", folder)
        monkeypatch.chdir(folder)
        return RunDir(folder / "runs" / "gpt-a")

    yield fresh
    monkeypatch.chdir(before)
    for folder in before.iterdir():
        if folder.name.startswith(f"{abs(hash(request.node.name))}-"):
            shutil.rmtree(folder)


def seal(path, raw):
    """Write a manifest with the digest that belongs to it."""
    raw.pop("self_digest", None)
    body = json.dumps(raw, indent=1).removesuffix("\n}").encode()
    end = f',\n "self_digest": "{bytes_digest(body)}"\n}}\n'.encode()
    (path / MANIFEST_NAME).write_bytes(body + end)


def read(path):
    return json.loads((path / MANIFEST_NAME).read_bytes())


def odd_manifest(raw, chance):
    """Something in it is not what it must be."""
    kind = chance.randrange(8)
    name = chance.choice([key for key in raw if key not in {"format", "self_digest"}])
    if kind == 0:
        raw["block_bytes"] = chance.choice(BLOCKS)
    elif kind == 1:
        raw["created"] = chance.choice(TIMES)
    elif kind == 2:
        tensor = chance.choice(list(raw["tensors"]))
        raw["tensors"][tensor] = chance.choice((*TEXTS, odd(chance)))
    elif kind == 3:
        tensor = chance.choice(list(raw["tensors"]))
        new = chance.choice(["", "\0", "../../../../canary", "a" * 5000, "\x1b[2J", "model.", "."])
        raw["tensors"] = {new if k == tensor else k: v for k, v in raw["tensors"].items()}
    elif kind == 4:
        file = chance.choice(raw["files"])
        file[chance.choice(list(file))] = chance.choice(
            [odd(chance), "../../../../../canary", "a\0b", 2**63, -1, "x" * 300, "xxh3_64:"]
        )
    elif kind == 5:
        raw["metrics"] = {"loss": odd(chance), "other": chance.choice(NUMBERS)}
    elif kind == 6:
        raw.pop(name)
    else:
        raw[name] = odd(chance)


def odd_table(path, raw, chance):
    """Something in the chunk table is not what it must be; its digest is."""
    columns = table.decode_columns((path / TABLE_NAME).read_bytes(), index.COLUMNS)
    columns = {name: column.astype(np.uint64) for name, column in columns.items()}
    name = chance.choice(list(columns))
    column = columns[name]
    kind = chance.randrange(4)
    if kind == 0 and len(column):
        column[chance.randrange(len(column))] = chance.choice(NUMBERS)
    elif kind == 1:
        columns[name] = column[: chance.randrange(len(column) + 1)]
    elif kind == 2:
        columns[name] = np.append(column, np.uint64(chance.choice(NUMBERS)))
    else:
        columns[name] = column[::-1]
    entries, data, position = {}, b"", 0
    for each, values in columns.items():
        part = values.astype("<u8").tobytes()
        spot = [position, position + len(part)]
        entries[each] = {"dtype": "U64", "shape": [len(values)], "data_offsets": spot}
        data, position = data + part, position + len(part)
    if chance.random() < 0.3:
        entries[name] = chance.choice(
            [{"dtype": odd(chance)}, {"dtype": "U64", "data_offsets": odd(chance)}, odd(chance),
             {"dtype": "U64", "data_offsets": [2**63, 2**70]}]
        )  # fmt: skip
    head = json.dumps(entries).encode()
    length = chance.choice([len(head)] * 6 + [2**63, 0, 2**64 - 1])
    content = struct.pack("<Q", length) + head + data
    (path / TABLE_NAME).write_bytes(content)
    for file in raw["files"]:
        if file["name"] == TABLE_NAME:
            file.update(size=len(content), digest=bytes_digest(content))


def tried(faults, what, run, capsys):
    """Every command, and the choice."""

    def call(words):
        code = main(words.split())
        out, err = capsys.readouterr()
        assert code in EXIT_CODES, f"exit code {code}"
        assert "Traceback" not in out + err
        assert code == 0 or out or err.count("\n") >= 1

    faults.of(f"{what}: choose", lambda: find.choose(run))
    for name, words in COMMANDS.items():
        faults.of(f"{what}: {name}", lambda words=words: call(words))
    if opened:
        faults.found.append(f"{what}: {opened[0]} was read")
        opened.clear()


def test_what_is_not_odd_is_read_by_every_command(case, capsys):
    case()
    codes = {name: main(words.split()) for name, words in COMMANDS.items()}

    said = capsys.readouterr()
    assert set(codes.values()) == {0}, (codes, said.err)


@cases(short=25, long=2500)
def test_an_odd_manifest_breaks_no_command(case, capsys, begin, end):
    faults = Faults(HpctrainError)
    for number, chance in chances(begin, end):
        run = case()
        path = find.step_path(run, ODD)
        raw = read(path)
        for _ in range(chance.choice((1, 1, 2))):
            try:
                odd_manifest(raw, chance)
            except (AttributeError, IndexError, KeyError, TypeError):
                break  # odd already
        seal(path, raw)
        tried(faults, f"case {number}", run, capsys)
        shutil.rmtree(run.root.parents[1])
    assert faults.found == []


@cases(short=25, long=2500)
def test_an_odd_chunk_table_breaks_no_command(case, capsys, begin, end):
    faults = Faults(HpctrainError)
    for number, chance in chances(begin, end):
        run = case()
        path = find.step_path(run, ODD)
        raw = read(path)
        odd_table(path, raw, chance)
        seal(path, raw)
        tried(faults, f"case {number}", run, capsys)
        shutil.rmtree(run.root.parents[1])
    assert faults.found == []
