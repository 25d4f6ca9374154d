"""The allocator's words are taken apart: fragmentation is told from capacity."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hpctrain.advise.doctor.faults import FAULTS, Certainty, Role, Sighting
from hpctrain.advise.doctor.words import gpu_memory, headline

NEW = (
    "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 40.00 GiB of "
    "which 0 bytes is free. Process 7 has {} GiB memory in use. Of the allocated memory {} GiB is "
    "allocated by PyTorch, and {} GiB is reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 40.00 GiB total capacity; 20.00 GiB "
    "already allocated; 0 bytes free; 39.00 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    ("asked", "others", "allocated", "unallocated", "advice"),
    [
        (2, 0, 20, 18, "expandable_segments"),
        (2, 0, 38, 1, None),
        (0.5, 0, 38, 1, None),  # of what is idle a block would fit, but it is little
        (2, 20, 18, 1, "other processes"),
        (15, 0, 24, 1, "one block"),
    ],
)
def test_what_the_numbers_call_for_comes_first(asked, others, allocated, unallocated, advice):
    words, do = gpu_memory(NEW.format(asked, others, allocated, unallocated))

    assert ("fragmentation" in words) is (advice == "expandable_segments")
    if advice is None:
        assert do == ()
    else:
        assert advice in do[0]


def test_older_wordings_tell_what_is_reserved_in_all():
    words, _ = gpu_memory(OLD)

    assert "19.0 GiB reserved but not in use: fragmentation" in words


def test_in_a_container_torch_takes_itself_for_another_process():
    assert gpu_memory(NEW.format(2, 39.9, 38, 1))[0].endswith("1.0 GiB reserved but not in use")
    shared = NEW.format(2, 25, 23, 1).replace("Of the", "Process 8 has 14.00 GiB memory in use. Of")

    words, do = gpu_memory(shared)

    assert "14.0 GiB held by other processes" in words
    assert "other processes" in do[0]


def test_a_line_without_sizes_says_nothing():
    assert gpu_memory("CUDA out of memory.") == ("", ())


DETAILS = [
    (
        "gpu_error",
        {"xid": "79", "gpu": "0000:4e"},
        "Xid 79 on 0000:4e: the GPU is gone from the bus",
    ),
    ("gpu_error", {"xid": "999"}, "Xid 999 on a GPU: see NVIDIA's list of Xid errors"),
    ("storage_full", {"path": "/s/a.pt"}, ": at /s/a.pt"),
    ("storage_error", {"path": "/s/a.pt"}, ": at /s/a.pt"),
    (
        "desync",
        {"first": "0", "operation": "ALLREDUCE", "second": "1", "other": "BROADCAST"},
        "rank 0 called ALLREDUCE, rank 1 BROADCAST",
    ),
    ("desync", {"first": "0", "operation": "ALLREDUCE"}, ": rank 0 called ALLREDUCE"),
    ("desync", {"missing": " 3"}, ": rank 3 did not come to a barrier"),
    (
        "transport",
        {"peer": "node2.", "card": "mlx5_0", "status": "12", "call": "poll", "vendor": "129"},
        "peer node2, card mlx5_0, status 12, call poll, vendor error 129",
    ),
    *((kind, {"port": "29500"}, ": port 29500") for kind in ("interface", "port_in_use")),
    *((kind, {"port2": "29501"}, ": port 29501") for kind in ("interface", "port_in_use")),
    *((kind, {"peer": "[n1]"}, "no answer from n1") for kind in ("interface", "port_in_use")),
    ("rendezvous", {"port": "29500"}, ": port 29500"),
    ("rendezvous", {"port2": "29501"}, ": port 29501"),
    ("rendezvous", {"peer": "n1"}, ": no answer from n1"),
    *(
        (kind, {"peer": "n1", "waited": "60 s"}, "no answer from n1 after 60 s")
        for kind in ("interface", "port_in_use", "rendezvous")
    ),
    ("checkpoint", {"was": "4", "now": "8", "key": "w"}, "written with 4, read with 8 for w"),
    ("checkpoint", {"was": "4", "now": "8"}, ": written with 4, read with 8"),
    ("nan", {}, ": the line itself"),
    ("unknown", {}, FAULTS["unknown"].title),
]


@pytest.mark.parametrize(("kind", "details", "ending"), DETAILS)
def test_what_was_read_of_the_line_stands_behind_the_title(kind, details, ending):
    line = seen(kind, details)

    text = headline(line, line.kind, [line])

    assert text.startswith(FAULTS[line.kind].title)
    assert ending in text


def test_the_programs_own_place_stands_behind_its_error():
    for kind in ("code", "native"):
        line = replace(seen(kind, {}), place="train.py:8 in main")

        assert headline(line, line.kind, [line]).endswith("the line itself at train.py:8 in main")


@pytest.mark.parametrize(
    "kind",
    [
        "stopped",
        "no_progress",
        "unfit_node",
        "fenced",
        "requeued",
        "hung_end",
        "completed",
        "running",
        "unknown",
    ],
)
def test_what_the_ledger_knows_better_has_its_title_alone(kind):
    line = seen(kind, {})

    assert headline(line, line.kind, [line]) == FAULTS[line.kind].title


def test_memory_stands_behind_its_title_where_the_line_tells_sizes():
    line = replace(seen("gpu_oom", {}), text=OLD)

    assert "asked for 2.0 GiB of 40.0 GiB" in headline(line, line.kind, [line])
    short = replace(line, text="CUDA out of memory.")
    assert headline(short, short.kind, [short]) == FAULTS[short.kind].title


def test_every_detail_of_the_table_has_an_example():
    """A row that is switched off is missed: each is filled in by a case above."""
    told = {kind for kind, _, _ in DETAILS} | {"code", "native", "gpu_oom"}
    rows = {kind for kind, known in FAULTS.items() if known.all_of or any(known.first_of)}

    assert rows <= told
    for kind, known in FAULTS.items():
        own = [details for name, details, _ in DETAILS if name == kind]
        for template in known.first_of:
            parts = set(re.findall(r"{(\w+)}", template)) - {
                "meaning",
                "message",
                "place",
                "memory",
            }
            assert not parts or any(parts <= details.keys() for details in own), (kind, template)


def seen(kind, details):
    return Sighting(
        "sign",
        kind,
        Role.CAUSE,
        Certainty.LIKELY,
        "the line itself",
        "train.log",
        details=details,
    )
