"""sbatch/stage_node.sh on real files: what a node does with an archive, and when it does not."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.small_disk import mounted

NODE = Path(__file__).parents[3] / "sbatch" / "stage_node.sh"
KEY = "0123456789abcdef"
ROOT_NAME = f"hpctrain-environments-{os.geteuid()}"
PYTHON = '#!/bin/sh\ncase "$1" in -I) echo "${0%/bin/python}";; *) echo "$0" "$@" "$PATH";; esac\n'
PAYLOAD = b"x" * 300_000


class Node:
    """One node: its disk, and the archive that it is given."""

    def __init__(self, folder):
        self.folder = folder
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.shared = folder / "shared"  # where the environment was packed
        self.shared.mkdir()
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.env = {**os.environ, "SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "55"}
        self.env["PATH"] = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        self.archive = folder / f"{KEY}.tar"
        self.pack()

    def pack(self, python=PYTHON, cfg=None):
        """Write the archive anew."""
        with tarfile.open(self.archive, "w") as tar:
            add(tar, "env/bin/python", python.encode(), mode=0o755)
            add(tar, "env/lib/module.py", PAYLOAD)
            add(tar, "env/lib/module.pyc", b"bytecode")
            if cfg is not None:
                add(tar, "env/pyvenv.cfg", cfg.encode())
                add(tar, "base/bin/python3", b"")
        self.sha256 = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        self.facts = {
            "key": KEY,
            "sha256": self.sha256,
            "archive": self.archive,
            "bytes": self.archive.stat().st_size,
            "unpacked": 320_000,
            "files": 2,
            "compress": "none",
            "prefix": self.shared,
            "python": "bin/python",
            "timeout": 20,
            "sent": "",
        }

    @property
    def root(self):
        return self.disk / ROOT_NAME

    @property
    def staged(self):
        return self.root / KEY

    def command(self, verb, *words, places=None, **facts):
        """The node's call of the script."""
        given = [f"{name}={value}" for name, value in (self.facts | facts).items()]
        places = [str(self.disk)] if places is None else places
        return ["bash", str(NODE), verb, *given, "--", *places, "--", *words]

    def call(self, verb, *words, env=None, **given):
        """Run it; what it prints, which never comes with a failure."""
        command = self.command(verb, *words, **given)
        env = {**self.env, **(env or {})}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip() + done.stderr.strip()

    def tool(self, name, text):
        """Put a program in front of the system's."""
        path = self.tools / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)


def add(tar, name, content, mode=0o644):
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_an_environment_is_unpacked_once_and_found_again(node):
    assert node.call("look") == f"hpctrain-stage n7 need {node.root}"
    assert node.call("get") == f"hpctrain-stage n7 staged {node.root}"

    node.archive.unlink()  # nobody reads it any more
    assert node.call("look") == "hpctrain-stage n7 have"
    assert node.call("get") == f"hpctrain-stage n7 reused {node.root}"
    assert (node.staged / "env/lib/module.py").read_bytes() == PAYLOAD
    assert stat.S_IMODE(node.root.stat().st_mode) == 0o700
    assert {path.name for path in node.root.iterdir()} == {KEY, f"{KEY}.lock"}


def test_tasks_start_from_it_with_its_folder_on_their_path(node):
    node.call("get")

    path = f"/a:{node.shared}/bin:{node.shared}/bin2:{os.environ['PATH']}"
    said = node.call("run", f"{node.shared}/bin/python", "-m", "x y", env={"PATH": path})

    python = node.staged / "env/bin/python"
    assert said == f"{python} -m x y /a:{python.parent}:{node.shared}/bin2:{os.environ['PATH']}"


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
@pytest.mark.parametrize("is_own", [True, False])
def test_the_environments_own_name_follows_and_anothers_stays(node, name, is_own):
    node.pack(PYTHON.replace('"$PATH"', f'"${name}"'))
    node.call("get")
    was = str(node.shared) if is_own else "/another"

    said = node.call("run", "python", env={name: was})

    assert said.split()[-1] == (str(node.staged / "env") if is_own else was)


def test_where_there_is_none_the_words_are_run_as_they_are(node):
    said = node.call("run", "echo", "shared", "python")

    assert said == "shared pythonhpctrain: n7 starts from the shared environment"


def test_a_torn_archive_is_told_and_leaves_nothing(node):
    with node.archive.open("r+b") as file:
        file.seek(100_000)
        file.write(b"torn")

    assert node.call("get") == (
        f"hpctrain-stage n7 no {node.archive} is torn: its digest is another"
    )
    assert [path.name for path in node.root.iterdir()] == [f"{KEY}.lock"]


def test_an_archive_that_ends_early_is_told(node):
    os.truncate(node.archive, 150_000)

    assert "is torn: its digest is another" in node.call("get")
    assert not node.staged.exists()


def test_a_compressed_archive_that_is_torn_early_is_told(node):
    node.pack("#!/bin/sh\n" + "".join(f"# {number}\n" for number in range(200_000)))
    packed = subprocess.run(["zstd", "-c", node.archive], capture_output=True, check=True).stdout
    node.archive.write_bytes(packed[:1000] + b"torn" + packed[1000:] + os.urandom(1 << 20))
    sha256 = hashlib.sha256(packed).hexdigest()

    said = node.call("get", compress="zstd", sha256=sha256)

    assert re.search(r" no \S+\.tar (is torn|cannot be unpacked): ", said)
    assert [path.name for path in node.root.iterdir()] == [f"{KEY}.lock"]


@pytest.mark.two_users  # only root mounts disks
def test_a_disk_that_fills_up_meanwhile_is_told_and_left_empty(node, tmp_path):
    node.tool(
        "df", 'if [ "$1" = -Pk ]; then printf "h\\nf 9 9 99999 9%% /\\n"; else /bin/df "$@"; fi'
    )
    with mounted(tmp_path / "small", 100 << 10) as disk:
        said = node.call("get", places=[str(disk)])

        assert re.search(
            r" no \S+\.tar cannot be unpacked: tar: .*(No space left|Wrote only)", said
        )
        assert [path.name for path in (disk / ROOT_NAME).iterdir()] == [f"{KEY}.lock"]


def test_an_archive_that_is_gone_is_told(node):
    node.archive.unlink()

    assert "no" in (said := node.call("get")).split()
    assert f"{node.archive} cannot be read: cat: " in said


def test_a_read_that_hangs_ends_at_the_time_out(node):
    node.tool("cat", 'if [[ "$*" == *.tar ]]; then exec sleep 60; fi; exec /bin/cat "$@"')

    assert node.call("get", timeout=1) == (
        f"hpctrain-stage n7 no {node.archive} was not read in time"
    )
    assert not node.staged.exists()


def test_it_may_be_compressed(node):
    packed = subprocess.run(["zstd", "-c", node.archive], capture_output=True, check=True)
    node.archive.write_bytes(packed.stdout)
    sha256 = hashlib.sha256(packed.stdout).hexdigest()

    assert " staged " in node.call("get", compress="zstd", sha256=sha256)
    assert (node.staged / "env/lib/module.py").read_bytes() == PAYLOAD


def test_a_tool_that_is_missing_is_named(node):
    for name in ("bash", "hostname"):
        (node.tools / name).symlink_to(shutil.which(name))

    said = node.call("get", env={"PATH": str(node.tools)}, compress="zstd")

    assert said == "hpctrain-stage n7 no tar is not on the PATH"
    assert node.call("get", compress="no-such-tool").endswith("no no-such-tool is not on the PATH")


def test_a_copy_that_was_sent_is_used_and_removed(node):
    node.call("look")
    sent = node.root / f"{KEY}.sent-55"
    shutil.move(node.archive, sent)

    assert " staged " in node.call("get", sent=sent)
    assert not sent.exists()


def test_half_of_a_copy_is_removed_too(node):
    node.call("look")
    half = node.root / f"{KEY}.sent-55"
    half.write_bytes(b"half")

    assert " staged " in node.call("get")
    assert not half.exists()


@pytest.mark.two_users  # only root mounts disks
def test_no_room_is_told_before_anything_is_unpacked(node, tmp_path):
    with mounted(tmp_path / "small", 256 << 10) as disk:
        said = node.call("get", places=[str(disk)], unpacked=10 << 20)

        root = disk / ROOT_NAME
        assert said == f"hpctrain-stage n7 no no room in {root}: 11 MiB needed, 0 MiB free"
        assert [path.name for path in root.iterdir()] == [f"{KEY}.lock"]
        assert node.call("look", places=[str(disk)]).startswith("hpctrain-stage n7 full no room")


def test_a_tenth_is_left_free(node):
    node.tool("df", "[ $1 = -Pk ] && printf 'head\\nfs 9 9 1076 9%% /\\n' || /bin/df \"$@\"")

    assert " staged " in node.call("get", unpacked=976 << 10)
    shutil.rmtree(node.root)
    assert "no room" in node.call("get", unpacked=1000 << 10)


@pytest.mark.two_users  # only root mounts disks
def test_too_few_names_for_files_are_no_room_either(node, tmp_path):
    with mounted(tmp_path / "small", 10 << 20, 8) as disk:
        said = node.call("get", places=[str(disk)], files=40)

        assert said.endswith(f"no room in {disk / ROOT_NAME}: 44 files needed, 5 free")


def test_what_nobody_runs_from_makes_room_the_longest_unused_first(node):
    older, newer, used = (node.root / name for name in ("older", "newer", "used"))
    node.call("look")
    for time, old in enumerate((older, newer, used)):
        old.mkdir()
        lock = node.root / f"{old.name}.lock"
        lock.touch()
        os.utime(lock, (time, time))
    # Room comes with the second that goes.
    node.tool(
        "df",
        f"[ -d {newer} ] && free=1 || free=100000\n"
        'if [ "$1" = -Pk ]; then printf "head\\nfs 9 9 $free 9%% /\\n"; else /bin/df "$@"; fi',
    )
    with (node.root / "older.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert " staged " in node.call("get")

    assert (older.is_dir(), newer.is_dir(), used.is_dir()) == (True, False, True)


def test_what_was_found_again_is_the_last_to_go(node):
    node.call("get")
    other = node.root / "other"
    other.mkdir()
    for name, time in ((KEY, 1), ("other", 2)):
        (node.root / f"{name}.lock").touch()
        os.utime(node.root / f"{name}.lock", (time, time))
    assert " reused " in node.call("get")
    node.tool(
        "df",
        f"[ -d {other} ] && free=1 || free=100000\n"
        'if [ "$1" = -Pk ]; then printf "head\\nfs 9 9 $free 9%% /\\n"; else /bin/df "$@"; fi',
    )

    node.call("get", key="third")

    assert (node.staged.is_dir(), other.exists()) == (True, False)


def test_what_another_has_unpacked_before_the_lock_came_is_taken(node):
    node.call("get")
    node.staged.rename(node.folder / "ready")
    move = f"mv -T {node.folder / 'ready'} {node.staged}"
    node.tool("flock", f'if [ "$1" = -n ]; then {move}; fi; exec {shutil.which("flock")} "$@"')

    assert " reused " in node.call("get")


def test_what_a_job_runs_from_is_held_to_its_end(node):
    node.call("get")
    node.tool("df", 'if [ "$1" = -Pk ]; then printf "h\\nf 9 9 1 9%% /\\n"; else /bin/df "$@"; fi')
    python = node.staged / "env/bin/python"
    python.write_text("#!/bin/sh\necho up\nread -r line\n")
    job = subprocess.Popen(
        node.command("run", "python"), env=node.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert job.stdout.readline() == b"up\n"

    assert "no room" in node.call("get", key="another")
    assert node.staged.is_dir()
    job.communicate(b"\n")
    assert "no room" in node.call("get", key="another")
    assert not node.staged.exists()


def test_two_at_once_unpack_it_once(node):
    reads = node.folder / "reads"
    node.tool("cat", f'[[ "$*" == *.tar ]] && echo >>{reads} && sleep 0.3; exec /bin/cat "$@"')
    calls = [
        subprocess.Popen(node.command("get"), env=node.env, stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]

    said = sorted(call.communicate()[0].split()[2] for call in calls)

    assert said == ["reused"] * 4 + ["staged"]
    assert reads.read_text() == "\n"


def test_who_waits_too_long_for_another_goes_without(node):
    node.call("look")
    with (node.root / f"{KEY}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = node.call("get", timeout=1)

    assert said == "hpctrain-stage n7 no another job was unpacking it for 1 s"


def test_what_a_cleaner_has_thinned_out_is_unpacked_anew(node):
    node.call("get")
    (node.staged / "env/lib/module.py").unlink()

    assert node.call("look") == f"hpctrain-stage n7 need {node.root}"
    assert " staged " in node.call("get")
    assert (node.staged / "env/lib/module.py").exists()


def test_what_is_thinned_out_and_in_use_is_left_alone(node):
    node.tool("sleep", "exit 0")
    node.call("get")
    (node.staged / "env/lib/module.py").unlink()
    with (node.root / f"{KEY}.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert "lacks files, and is in use" in node.call("get")

    assert (node.staged / "env/bin/python").exists()


def test_what_a_killed_job_has_left_half_unpacked_is_unpacked_anew(node):
    node.call("look")
    (node.root / f"{KEY}.new" / "env").mkdir(parents=True)

    assert " staged " in node.call("get")
    assert not (node.root / f"{KEY}.new").exists()


def test_a_python_that_does_not_start_there_is_not_taken(node):
    node.pack("#!/bin/sh\necho 'libfoo.so: not found' >&2\nexit 1\n")

    said = node.call("get")

    assert said.endswith(f"its python does not start from {node.root}: libfoo.so: not found")
    assert not node.staged.exists()


def test_a_python_of_another_prefix_is_not_taken(node):
    node.pack("#!/bin/sh\necho /elsewhere\n")

    assert "does not start from" in node.call("get")
    assert not node.staged.exists()


def test_a_venv_is_told_where_its_own_interpreter_lies_now(node):
    node.pack(cfg="home = /shared/base/bin\ninclude-system-site-packages = false\nhomely = x")
    node.call("get")

    assert (node.staged / "env/pyvenv.cfg").read_text() == (
        f"home = {node.staged}/base/bin\ninclude-system-site-packages = false\nhomely = x\n"
    )


@pytest.mark.two_users
def test_a_folder_that_another_has_made_is_refused(node):
    node.root.mkdir(mode=0o700)
    os.chown(node.root, 12345, 12345)

    said = node.call("get")

    assert said.endswith(f"{node.root} is not this user's alone (12345 700 directory)")
    assert not list(node.root.iterdir())


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_into_which_others_see_is_refused(node, mode):
    node.root.mkdir()
    node.root.chmod(mode)

    assert "is not this user's alone" in node.call("get")
    assert "shared environment" in node.call("run", "true")


def test_a_link_is_refused_wherever_it_leads(node, tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    node.root.symlink_to(tmp_path / "own")

    assert "is not this user's alone" in node.call("get")
    assert not list((tmp_path / "own").iterdir())


@pytest.mark.parametrize(("mode", "taken"), [(0o777, False), (0o775, False), (0o1777, True)])
def test_a_place_in_which_others_can_move_folders_is_refused(node, mode, taken):
    node.disk.chmod(mode)

    said = node.call("get")

    assert (" staged " in said) is taken
    assert ("others can move what lies there" in said) is not taken


@pytest.mark.parametrize("kind", ["nfs", "lustre", "gpfs", "beegfs", "cephfs"])
def test_a_shared_file_system_is_no_nodes_own(node, kind):
    node.tool("stat", f'[ "$1" = -f ] && echo {kind} || exec /usr/bin/stat "$@"')

    assert node.call("get") == f"hpctrain-stage n7 no {node.disk} is shared ({kind})"
    assert not node.root.exists()


def test_the_first_place_that_will_do_is_taken(node):
    places = ["$NOT_SET/x", "relative", "/no/such", "${DISK_OF_NODE}", "/usr"]

    said = node.call("get", places=places, env={"DISK_OF_NODE": str(node.disk)})

    assert said == f"hpctrain-stage n7 staged {node.root}"
    said = node.call("run", "python", places=places, env={"DISK_OF_NODE": str(node.disk)})
    assert said.startswith(str(node.staged))


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("$NOT_SET/x", "$NOT_SET/x has a variable that is not set here"),
        ("relative", "relative is no absolute path"),
        ("/no/such", "/no/such is no folder here"),
        ("$(touch HERE)", "$(touch HERE) is no absolute path"),
    ],
)
def test_a_place_that_will_not_do_is_told_with_why(node, place, why):
    assert node.call("get", places=[place]) == f"hpctrain-stage n7 no {why}"
