"""For which machines an image is: from its bytes, whatever they are."""

from __future__ import annotations

import io
import json
import os
import platform
import random
import sys
import tarfile
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm import container_checks
from hpctrain.cluster.scheduler.slurm.container_checks import elf_machine, inside, machines
from tests.support.fuzzing import RAW, VALUES, cases

AMD = bytes.fromhex("7f454c460201010000000000000000000200 3e00".replace(" ", ""))
ARM = bytes.fromhex("7f454c460201010000000000000000000300 b700".replace(" ", ""))
POWER = bytes.fromhex("7f454c460201010000000000000000000300 1500".replace(" ", ""))
BIG_POWER = bytes.fromhex("7f454c460202010000000000000000000003 0015".replace(" ", ""))
SHORT_ARM = bytes.fromhex("7f454c460101010000000000000000000200 2800".replace(" ", ""))


def sif(code: bytes) -> bytes:
    launch = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0")
    return launch + b"SIF_MAGIC\0" + b"01\0" + code + b"\0" + bytes(5000)


def archive(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


def docker(architecture: object) -> dict[str, bytes]:
    """What `docker save` writes, a layer before what counts."""
    return {
        "aa/layer.tar": bytes(70_000),
        "c0ffee.json": dumped({"architecture": architecture, "os": "linux"}),
        "manifest.json": dumped([{"Config": "c0ffee.json", "Layers": ["aa/layer.tar"]}]),
    }


def oci(*architectures: str) -> dict[str, bytes]:
    """An OCI layout, an image for each."""
    files, entries = {}, []
    for number, name in enumerate(architectures):
        manifest, config = f"{number:064x}", f"{number + 100:064x}"
        files[f"blobs/sha256/{config}"] = dumped({"architecture": name})
        files[f"blobs/sha256/{manifest}"] = dumped({"config": {"digest": f"sha256:{config}"}})
        entries.append({"digest": f"sha256:{manifest}"})
    return {"oci-layout": b"{}", "index.json": dumped({"manifests": entries}), **files}


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (b"02", {"x86_64"}),
        (b"04", {"aarch64"}),
        (b"06", {"ppc64le"}),
        (b"00", set()),
        (b"xx", set()),
    ],
)
def test_a_sif_says_it_in_its_header(tmp_path, code, expected):
    assert machines(written(tmp_path / "image.sif", sif(code))) == expected


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

    assert machines(root) == {"aarch64"}
    assert inside(root, "bin/sh") == root / "usr/bin/dash"


def test_no_link_leads_out_of_a_folder(tmp_path):
    root = tmp_path / "root"
    written(tmp_path / "out/sh", AMD)
    root.mkdir()
    for name, target in (("bin", str(tmp_path / "out")), ("usr", "../out")):
        (root / name).symlink_to(target)

    assert machines(root) == frozenset()


def test_links_in_a_ring_and_files_that_never_end_are_passed_over(tmp_path):
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/sh").symlink_to("sh")
    os.mkfifo(root / "bin/bash")
    written(root / "usr/bin/env", AMD)

    assert machines(root) == {"x86_64"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (docker("arm64"), {"aarch64"}),
        (docker("amd64"), {"x86_64"}),
        (docker("wasm"), set()),
        (docker(7), set()),
        (oci("arm64"), {"aarch64"}),
        (oci("arm64", "amd64"), {"aarch64", "x86_64"}),
        (oci("arm64", "386"), set()),
        (oci(), set()),
    ],
)
def test_archives_and_folders_of_layouts_say_it_in_the_configuration(tmp_path, files, expected):
    assert machines(written(tmp_path / "image.tar", archive(files))) == expected
    if "oci-layout" in files:
        for name, content in files.items():
            written(tmp_path / "layout" / name, content)
        assert machines(tmp_path / "layout") == expected


def test_an_index_of_indexes_with_platforms_and_what_a_builder_attests(tmp_path):
    inner = {
        "manifests": [
            {"digest": "sha256:" + "1" * 64, "platform": {"architecture": "arm64"}},
            {"digest": "sha256:" + "2" * 64, "platform": {"architecture": "unknown"}},
        ]
    }
    files = {
        "index.json": dumped({"manifests": [{"digest": "sha256:" + "a" * 64}]}),
        "blobs/sha256/" + "a" * 64: dumped(inner),
    }
    assert machines(written(tmp_path / "image.tar", archive(files))) == {"aarch64"}


def test_an_image_under_two_names_is_one(tmp_path):
    files = oci("arm64")
    index = json.loads(files["index.json"])
    files["index.json"] = dumped({"manifests": index["manifests"] * 2})
    assert machines(written(tmp_path / "image.tar", archive(files))) == {"aarch64"}


def test_an_index_of_itself_many_times_is_read_once(tmp_path, monkeypatch):
    itself = {"manifests": [{"digest": "sha256:" + "a" * 64}] * 64}
    files = {"index.json": dumped(itself), "blobs/sha256/" + "a" * 64: dumped(itself)}
    image = written(tmp_path / "ring.tar", archive(files))
    read = []
    monkeypatch.setattr(container_checks.json, "loads", lambda text: read.append(text) or itself)

    assert machines(image) == frozenset()
    assert len(read) == 2


def test_a_layout_reads_nothing_outside_of_itself(tmp_path):
    written(tmp_path / "secret.json", dumped({"architecture": "arm64"}))
    layout = tmp_path / "layout"
    written(layout / "oci-layout", b"{}")
    written(layout / "manifest.json", dumped([{"Config": "../secret.json"}]))

    assert machines(layout) == frozenset()


def test_squashfs_is_not_known_and_what_is_no_file_is_an_error(tmp_path):
    assert machines(written(tmp_path / "image.sqsh", b"hsqs" + bytes(4096))) == frozenset()
    with pytest.raises(FileNotFoundError):
        machines(tmp_path / "none.sif")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not an ordinary file"):
        machines(tmp_path / "fifo")


def test_a_member_of_terabytes_is_not_read(tmp_path):
    whole = bytearray(archive({"manifest.json": b"[]"}))
    whole[124:136] = b"\x80" + bytes(3) + b"\xff" * 8
    whole[148:156] = b" " * 8
    whole[148:156] = b"%06o\0 " % sum(whole[:512])

    assert machines(written(tmp_path / "image.tar", bytes(whole))) == frozenset()


SEEDS = (
    sif(b"04"),
    archive(docker("arm64")),
    archive(oci("arm64", "amd64")),
    archive({"index.json": b"[" * 100_000}),
    *(archive({"manifest.json": raw, "index.json": raw}) for raw in RAW),
)


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
        assert machines(image) <= {"x86_64", "aarch64", "ppc64", "ppc64le", "s390x", "riscv64"}


@pytest.mark.parametrize("value", VALUES)
def test_whatever_json_says_there_is_an_answer(tmp_path, value):
    for record in (value, [value], {"manifests": value}, {"manifests": [value]},
                   [{"Config": value}], {"manifests": [{"digest": value, "platform": value}]},
                   {"config": value}):  # fmt: skip
        layout = {"index.json": dumped(record), "manifest.json": dumped(record)}
        for names in (("index.json",), ("manifest.json",), tuple(layout)):
            content = archive({name: layout[name] for name in names})
            assert machines(written(tmp_path / "image.tar", content)) == frozenset()
