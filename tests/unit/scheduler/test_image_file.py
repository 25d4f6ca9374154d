"""For which machines an image is: from its bytes, whatever they are."""

from __future__ import annotations

import os
import platform
import random
import sys
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.container_checks import elf_machine, inside, machine_of
from tests.support.fuzzing import RAW, cases

AMD = bytes.fromhex("7f454c460201010000000000000000000200 3e00".replace(" ", ""))
ARM = bytes.fromhex("7f454c460201010000000000000000000300 b700".replace(" ", ""))
POWER = bytes.fromhex("7f454c460201010000000000000000000300 1500".replace(" ", ""))
BIG_POWER = bytes.fromhex("7f454c460202010000000000000000000003 0015".replace(" ", ""))
SHORT_ARM = bytes.fromhex("7f454c460101010000000000000000000200 2800".replace(" ", ""))


def sif(code: bytes) -> bytes:
    launch = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0")
    return launch + b"SIF_MAGIC\0" + b"01\0" + code + b"\0" + bytes(5000)


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (b"02", "x86_64"),
        (b"04", "aarch64"),
        (b"06", "ppc64le"),
        (b"00", ""),
        (b"xx", ""),
    ],
)
def test_a_sif_says_it_in_its_header(tmp_path, code, expected):
    assert machine_of(written(tmp_path / "image.sif", sif(code))) == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (AMD, "x86_64"),
        (ARM, "aarch64"),
        (POWER, "ppc64le"),
        (BIG_POWER, "ppc64"),
        (SHORT_ARM, ""),
        (AMD[:19], ""),
        (b"", ""),
        (b"#!/bin/true, a script", ""),
    ],
)
def test_a_program_says_it_in_its_header(head, expected):
    assert elf_machine(head) == expected


def test_this_machine_says_what_its_own_programs_say():
    assert elf_machine(Path(sys.executable).read_bytes()) == platform.machine()


def test_a_folder_is_known_by_its_shell_behind_links_that_stay_inside(tmp_path):
    root = tmp_path / "root"
    written(root / "usr/bin/dash", ARM)
    (root / "bin").symlink_to("usr/bin")
    (root / "usr/bin/sh").symlink_to("/../../etc/../usr/bin/dash")

    assert machine_of(root) == "aarch64"
    assert inside(root, "bin/sh") == root / "usr/bin/dash"


def test_no_link_leads_out_of_a_folder(tmp_path):
    root = tmp_path / "root"
    written(tmp_path / "out/sh", AMD)
    root.mkdir()
    for name, target in (("bin", str(tmp_path / "out")), ("usr", "../out")):
        (root / name).symlink_to(target)

    assert machine_of(root) == ""


def test_links_in_a_ring_and_files_that_never_end_are_passed_over(tmp_path):
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/sh").symlink_to("sh")
    os.mkfifo(root / "bin/bash")
    written(root / "usr/bin/env", AMD)

    assert machine_of(root) == "x86_64"


def test_squashfs_is_not_known_and_what_is_no_file_is_an_error(tmp_path):
    assert machine_of(written(tmp_path / "image.sqsh", b"hsqs" + bytes(4096))) == ""
    with pytest.raises(FileNotFoundError):
        machine_of(tmp_path / "none.sif")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not an ordinary file"):
        machine_of(tmp_path / "fifo")


KNOWN = ("", "x86_64", "aarch64", "ppc64", "ppc64le", "s390x", "riscv64")
SEEDS = (sif(b"04"), sif(b"02"), AMD, b"hsqs" + bytes(4096), *filter(None, RAW))


@cases(1000, 20_000)
def test_whatever_the_bytes_are_there_is_an_answer(tmp_path, begin, end):
    image = tmp_path / "image"
    for number in range(begin, end):
        draw = random.Random(number)
        content = bytearray(draw.choice(SEEDS))
        for _ in range(draw.randrange(6)):
            content[draw.randrange(min(len(content), draw.choice((64, 2048, 10**9))))] = (
                draw.randrange(256)
            )
        image.write_bytes(content[: draw.randrange(len(content) + 1) if number % 2 else None])
        assert machine_of(image) in KNOWN
