"""An environment is packed once for all that need the same, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

from hpctrain.core.settings.schema import (
    ContainerSettings,
    EnvironmentSettings,
    Settings,
    SlurmSettings,
)
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import HpctrainError
from hpctrain.launch import environment_archive as archives
from hpctrain.launch.environment_archive import Interpreter, files_of
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.staging import Staging, places_of, read_staging


@pytest.fixture
def python(tmp_path):
    """An environment of three files; what is asked of it is no real interpreter's."""
    prefix = tmp_path / "env"
    for name in ("bin/python", "lib/a.py", "lib/a.pyc"):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text(name * 1000)
    (prefix / "bin/python").chmod(0o755)
    (prefix / "link").symlink_to("lib")
    return Interpreter(prefix, prefix, "3.11", prefix / "lib", prefix / "bin" / "python")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / ".environments-0"


@pytest.fixture(autouse=True)
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def spec_of(python="", cluster="slurm", image="", nodes="2", **environment):
    spec = Spec("gpt", "id", 0.0, cluster, "", Entry("recipe"), python=python)
    spec.settings = Settings(
        slurm=SlurmSettings(nodes=nodes),
        container=ContainerSettings(image=image),
        environment=EnvironmentSettings(**environment),
    )
    return spec


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_what_is_packed_comes_out_again(python, folder, tmp_path, compress):
    archive, packed_s = archives.archive_of(python, folder, compress)

    assert packed_s is not None
    content = Path(archive.path).read_bytes()
    assert (hashlib.sha256(content).hexdigest(), len(content)) == (
        archive.sha256,
        archive.size_bytes,
    )
    plain = tmp_path / "plain.tar"
    tools = {"none": "cat", "zstd": "zstd -dcq"}
    with plain.open("wb") as out:
        subprocess.run(
            [*tools[compress].split(), *(["-"] if compress != "none" else [])],
            input=content,
            stdout=out,
            check=True,
        )
    with tarfile.open(plain) as tar:
        tar.extractall(tmp_path / "out", filter="tar")
    out = tmp_path / "out" / "env"
    for name in ("bin/python", "lib/a.py", "lib/a.pyc"):
        source = python.prefix / name
        assert (out / name).read_text() == source.read_text()
        assert int((out / name).stat().st_mtime) == int(source.stat().st_mtime)
    assert os.access(out / "bin/python", os.X_OK)
    assert (out / "link").readlink() == Path("lib")
    assert (archive.files, archive.prefix, archive.python) == (2, str(python.prefix), "bin/python")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_same_is_packed_once_and_another_anew(python, folder):
    first, _ = archives.archive_of(python, folder, "none")
    again, packed_s = archives.archive_of(python, folder, "none")
    (python.prefix / "lib/b.py").touch()
    other, other_s = archives.archive_of(python, folder, "none")

    assert (again, packed_s) == (first, None)
    assert other.key != first.key
    assert other_s is not None


def test_two_at_once_pack_it_once(python, folder, monkeypatch):
    written = []
    real = archives._write
    monkeypatch.setattr(archives, "_write", lambda *args: (written.append(1), real(*args))[1])
    told = []
    threads = [
        threading.Thread(target=lambda: told.append(archives.archive_of(python, folder, "none")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(written) == 1
    assert len({archive.key for archive, _ in told}) == 1
    assert sum(packed_s is not None for _, packed_s in told) == 1


def test_what_changes_while_it_is_packed_is_not_taken(python, folder, monkeypatch):
    def late(python):
        files = files_of(python)
        (python.prefix / "lib/a.py").write_text("another")
        return files

    monkeypatch.setattr(archives, "files_of", late)

    with pytest.raises(HpctrainError, match=r"a\.py has changed while it was packed"):
        archives.archive_of(python, folder, "zstd")
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_an_archive_that_was_cut_is_packed_anew(python, folder):
    first, _ = archives.archive_of(python, folder, "none")
    os.truncate(first.path, 100)

    again, packed_s = archives.archive_of(python, folder, "none")

    assert packed_s is not None
    assert Path(again.path).stat().st_size == first.size_bytes


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_facts_that_make_no_sense_are_written_anew(python, folder, text):
    first, _ = archives.archive_of(python, folder, "none")
    (folder / f"{first.key}.json").write_text(text)

    assert archives.archive_of(python, folder, "none")[1] is not None


def test_a_tool_that_fails_is_told_and_leaves_nothing(python, folder, monkeypatch):
    monkeypatch.setattr(archives, "_ZSTD", ["sh", "-c", "echo full >&2; exit 3"])

    with pytest.raises(HpctrainError, match="zstd has ended with 3: full"):
        archives.archive_of(python, folder, "zstd")
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_what_nothing_has_used_for_long_goes_when_another_is_packed(python, folder):
    old, _ = archives.archive_of(python, folder, "none")
    (python.prefix / "lib/b.py").touch()
    used, _ = archives.archive_of(python, folder, "none")
    long_ago = 40 * 86400
    for key in (old.key, used.key):
        os.utime(folder / f"{key}.json", (long_ago, long_ago))
    assert archives.archive_of(python, folder, "none") == (used, None)  # which counts as its use
    (python.prefix / "lib/c.py").touch()
    new, _ = archives.archive_of(python, folder, "none")

    left = {path.name for path in folder.iterdir() if path.suffix != ".lock"}
    assert left == {f"{one.key}.{suffix}" for one in (used, new) for suffix in ("json", "tar")}


@pytest.mark.parametrize("kind", ["open", "link"])
def test_a_folder_that_is_not_the_users_alone_is_refused(python, folder, tmp_path, kind):
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o755)
    else:
        (tmp_path / "own").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "own")

    with pytest.raises(HpctrainError, match="is not this user's alone"):
        archives.archive_of(python, folder, "none")


def test_a_launch_is_told_where_the_archive_lies_and_what_is_read_in_place(
    python, runs, monkeypatch, tmp_path
):
    monkeypatch.setattr(archives, "interpreter", lambda _: python)
    (tmp_path / "checkout").mkdir()
    (python.purelib / "own.pth").write_text(f"{tmp_path}/checkout\n")
    run = RunDir(runs / "gpt")
    run.root.mkdir()

    staging, notes = archives.staging_for(spec_of(stage="yes", stage_dir="$NVME"), runs)
    staging.write(run)

    assert read_staging(run) == staging
    assert staging.places == ["$NVME"]
    assert Path(staging.archive.path).is_relative_to(runs / f".environments-{os.geteuid()}")
    packed, outside = notes
    assert "(3 files, " in packed
    assert " packed in " in packed
    assert outside == f"environment.stage: read from where they lie: {tmp_path}/checkout"
    assert "was packed before" in archives.staging_for(spec_of(stage="yes"), runs)[1][0]


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_how_far_the_packing_is_is_shown(python, folder, compress):
    shown, done = [], []

    @contextlib.contextmanager
    def progress(label, total):
        shown.append((label, total))
        yield done.append
        shown.append("gone")

    for _ in range(2):  # what is there is not packed, and nothing is shown of it
        archives.archive_of(python, folder, compress, progress)

    (label, total), *more = shown
    assert label == "packing the environment:"
    assert more == ["gone"]
    assert 0 < total <= sum(done)


def test_what_cannot_be_packed_is_said_and_refuses_nothing(runs):
    staging, notes = archives.staging_for(spec_of(python="/no/python", stage="yes"), runs)

    assert staging.archive is None
    assert staging.why.startswith("the environment was not packed: /no/python does not say")
    assert notes == [f"environment.stage: {staging.why}; nodes read it"]


@pytest.mark.parametrize(("there", "taken"), [(None, "none"), ("/usr/bin/zstd", "zstd")])
def test_zstd_packs_where_it_is_here(monkeypatch, there, taken):
    monkeypatch.setattr(shutil, "which", lambda _: there)

    assert archives.chosen() == taken


@pytest.mark.parametrize(
    ("given", "is_staged"),
    [
        ({"stage": "no"}, False),
        ({"stage": "yes"}, True),
        ({"stage": "yes", "cluster": "local"}, False),
        ({"stage": "yes", "image": "/image.sif"}, False),
        ({"stage": "auto", "nodes": "7"}, False),
        ({"stage": "auto", "nodes": "2-8"}, True),
    ],
)
def test_which_runs_are_staged(runs, given, is_staged):
    staging, _ = archives.staging_for(spec_of(python="/no/python", **given), runs)

    assert (staging is not None) is is_staged


def test_places_of_a_node_the_best_first():
    assert places_of(Settings(), "") == ["$SLURM_TMPDIR", "$TMPDIR", "/tmp"]  # noqa: S108
    assert places_of(Settings(), "$L_SCRATCH")[:2] == ["$SLURM_TMPDIR", "$L_SCRATCH"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"archive": {}}', "{"])
def test_a_staging_json_of_another_version_is_told(runs, text):
    run = RunDir(runs / "gpt")
    run.root.mkdir()
    run.staging.write_text(text)

    with pytest.raises(ValueError, match=r"version of hpctrain|Expecting"):
        read_staging(run)


def test_a_staging_json_of_its_own_version_with_a_strange_archive_is_told(runs):
    run = RunDir(runs / "gpt")
    run.root.mkdir()
    Staging(why="x").write(run)
    run.staging.write_text(
        json.dumps(json.loads(run.staging.read_text()) | {"archive": {"key": 1}})
    )

    with pytest.raises(ValueError, match="not the facts of a packed environment"):
        read_staging(run)
