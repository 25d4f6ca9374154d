"""Each row of faults.toml and lines.toml matters: a verdict changes when it is switched off."""

from __future__ import annotations

import re

import pytest

from hpctrain.advise.doctor import lines, scan
from hpctrain.advise.doctor.faults import (
    FAULTS,
    OF_WORDS,
    TABLE,
    Certainty,
    LogFacts,
    Role,
    Sighting,
)
from hpctrain.advise.doctor.judge import judge
from hpctrain.advise.doctor.lines import LINES, plain
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.ledger.history.run_state import EndCause

FAMILIES = [(name, kind) for name, kinds in TABLE["families"].items() for kind in kinds]
EXPLAINS = [(kind, other) for kind, others in TABLE["explains"].items() for other in others]
TRACED = (
    'Traceback (most recent call last):\n  File "/home/u/train.py", line 24, in main\n    raise X\n'
)


def read(text, source="train.log"):
    scanner = LogScanner(source)
    scanner.feed(text.encode())
    return scanner.finish()


def of(kind, source="a.log", role=Role.CAUSE):
    """A log that says one thing, at a time that nobody knows."""
    sighting = Sighting(kind, kind, role, Certainty.LIKELY, kind, source, line=1, place="x.py:1")
    return LogFacts(source, 1, [sighting])


def test_the_tables_name_faults_that_there_are():
    names = {kind for row in FAMILIES + EXPLAINS for kind in row} - TABLE["families"].keys()

    assert names | {kind for kind, _, _ in OF_WORDS.values()} <= FAULTS.keys()


@pytest.mark.parametrize(("name", "kind"), FAMILIES)
def test_a_fault_is_not_ruled_out_by_its_own_family(name, kind, monkeypatch):
    assert name not in judge([of(kind)]).ruled_out

    without = [other for other in TABLE["families"][name] if other != kind]
    monkeypatch.setitem(TABLE["families"], name, without)
    assert name in judge([of(kind)]).ruled_out


def test_what_is_ruled_out_is_said_of_all_families():
    families = {
        "GPU memory", "a GPU's fault", "a node's memory", "storage", "the network", "a hang",
        "numbers", "the scheduler",
    }  # fmt: skip

    assert judge([of("code")]).ruled_out.keys() == families


@pytest.mark.parametrize(("kind", "other"), [row for row in EXPLAINS if row[0] != "nan"])
def test_two_faults_of_which_one_explains_the_other_are_no_riddle(kind, other, monkeypatch):
    logs = [of(other, "b.log"), of(kind)]
    assert (judge(logs).kind, judge(logs).rivals) == (kind, ())

    without = [each for each in TABLE["explains"][kind] if each != other]
    monkeypatch.setitem(TABLE["explains"], kind, without)
    assert len(judge(logs).rivals) == 1


@pytest.mark.parametrize("other", ["gpu_assert", "fp16_overflow"])
def test_numbers_that_are_none_come_before_what_they_lead_to(other, monkeypatch):
    log, later = of("nan", role=Role.HINT), of(other).sightings[0]
    log.sightings.append(Sighting(**{**vars(later), "offset": 9}))
    assert judge([log]).kind == "nan"

    without = [each for each in TABLE["explains"]["nan"] if each != other]
    monkeypatch.setitem(TABLE["explains"], "nan", without)
    assert judge([log]).kind == other


def test_what_explains_another_fault_is_all_tried():
    assert len(EXPLAINS) == 11
    assert TABLE["explains"]["nan"] == ["gpu_assert", "fp16_overflow"]


WORDS = {
    EndCause.NCCL_ERROR: ("DistNetworkError: it failed", "transport"),
    EndCause.NAN: ("FloatingPointError: at step 12", "nan"),
    EndCause.GPU_ERROR: ("torch.AcceleratorError: no", "gpu_error"),
    EndCause.HOST_OOM: ("RuntimeError: DefaultCPUAllocator: not enough", "host_oom"),
    EndCause.STORAGE_FULL: ("CheckpointError: write failed (ENOSPC)", "storage_full"),
    EndCause.STORAGE_ERROR: ("FileSystemFault: x cannot be read", "storage_error"),
}


@pytest.mark.parametrize("cause", OF_WORDS)
def test_an_error_that_no_signature_knows_is_read_by_the_ledger_s_words(cause, monkeypatch):
    line, kind = WORDS[cause]
    assert judge([read(f"{TRACED}{line}\n")]).kind == kind

    monkeypatch.delitem(OF_WORDS, cause)
    assert judge([read(f"{TRACED}{line}\n")]).kind == "code"


def test_every_word_of_the_ledger_is_tried():
    assert WORDS.keys() == OF_WORDS.keys()


PREFIXED = (
    "E0227 17:39:41.51 29 site-packages/torch/distributed/elastic/x.py:732] no",
    "[2024-05-10 22:43:34,776] torch.distributed.run: [WARNING] no",
    "ERROR:torch.distributed.elastic.multiprocessing.api:no",
    "[2026-11-28 10:11:12,123] no",
    "[rank3]: no",
    "[rank3][E321 02:07:08.4 x.cpp:1] no",
    "[default5]:no",
    "[1,2]<stderr>:no",
    "[RANK 7] no",
    "worker-a: n1:1:2 [0] NCCL INFO no",
    "worker-1: ValueError: no",
    "12: no",
    "(Worker pid=12, ip=10.0.0.1) no",
    "10.0.0.1 [3] no",
    "stderr: no",
    "  | ValueError: no",
    "100%|####| 3/3 [rank1]: no",
)


@pytest.mark.parametrize("row", range(len(PREFIXED)))
def test_each_prefix_is_taken_off_by_its_row(row, monkeypatch):
    line = PREFIXED[row]
    text = plain(line).text
    assert text != line

    without = [prefix for at, prefix in enumerate(lines._PREFIXES) if at != row]
    monkeypatch.setattr(lines, "_PREFIXES", without)
    assert plain(line).text not in {text, ""}


BEGUN = (
    "Traceback (most recent call last):", '  File "x.py", line 1', "[rank1]: no", "[1,2]<stderr>no",
    "3: no", "2026-11-28 no", "stderr: no", "Net : Call to no", "(Worker pid=1) no",
    "E0227 17:39 no", "my.ValueError: no",
)  # fmt: skip


@pytest.mark.parametrize(("part", "begun"), list(zip(LINES["begins"], BEGUN, strict=True)))
def test_a_node_stands_before_what_begins_a_line(part, begun):
    names = re.compile("|".join(LINES["begins"]))
    without = re.compile("|".join(each for each in LINES["begins"] if each != part))

    assert plain(f"node-1: {begun}").node == "node-1"
    assert names.match(begun)
    assert not without.match(begun)
    assert not re.match(part, "step 3 of 4")


LIBRARIES = (
    "/opt/site-packages/x.py", "/usr/lib/python3.11/x.py", "<frozen runpy>", "/src/torch/x.py",
    "torch/x.py", "x.pyx", "/opt/bin/torchrun", "/src/deepspeed/x.py",
)  # fmt: skip


@pytest.mark.parametrize(
    ("part", "file"), list(zip(LINES["tracebacks"]["libraries"], LIBRARIES, strict=True))
)
def test_a_file_of_a_library_is_none_of_the_programs(part, file):
    others = [re.compile(each) for each in LINES["tracebacks"]["libraries"] if each != part]

    assert scan._LIBRARY.search(file)
    assert not any(each.search(file) for each in others)
    assert not scan._LIBRARY.search("/home/u/train.py")


@pytest.mark.parametrize("name", LINES["tracebacks"]["wrappers"])
def test_an_exception_that_passes_on_another_s_is_none(name):
    plain_name = name.replace("\\S*", "")

    assert judge([read(f"{TRACED}my.{plain_name}: no\n")]).kind == "unknown"
    assert judge([read(f"{TRACED}my.Own{plain_name}: no\n")]).kind == "code"


@pytest.mark.parametrize("words", ["it ended with a nonzero status", "it exited with code 3"])
def test_an_error_about_a_child_only_points_to_it(words):
    found = judge([read(f"{TRACED}RuntimeError: {words}\n")])

    assert (found.kind, found.certainty) == ("code", Certainty.POSSIBLE)


LAUNCHERS = (
    "/opt/torch/distributed/run.py", "/opt/bin/torchrun", "/opt/accelerate/commands/launch.py",
    "/usr/lib/python3.11/multiprocessing/spawn.py", "/usr/lib/python3.11/runpy.py",
)  # fmt: skip


@pytest.mark.parametrize(
    ("part", "file"), list(zip(LINES["tracebacks"]["launchers"], LAUNCHERS, strict=True))
)
def test_a_traceback_that_is_cut_within_a_launcher_says_nothing(part, file):
    others = [each for each in LINES["tracebacks"]["launchers"] if each != part]
    head, frame = TRACED.splitlines()[0], f'  File "{file}", line 3, in x'

    assert judge([read(f"{head}\n{frame}\n")]).kind == "unknown"
    assert not any(re.search(each, file) for each in others)


SIZES = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 40.00 GiB "


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fragmented", f"{SIZES.format(2)}and 18.00 GiB is reserved by PyTorch but unallocated."),
        ("others", f"{SIZES.format(2)}Process 7 has 20.00 GiB memory in use."),
        ("asked", SIZES.format(15)),
    ],
)
def test_the_allocator_s_numbers_call_for_their_own_advice(name, line):
    assert judge([read(f"torch.OutOfMemoryError: {line}\n")]).do[0] == TABLE["gpu_memory"][name]
