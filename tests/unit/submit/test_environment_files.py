"""Which files of an environment are packed, under which names, and what makes it another one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.launch.environment_archive import (
    Interpreter,
    files_of,
    interpreter,
    key_of,
    read_in_place,
    unpacked_bytes,
)

VERSION = "3.11"


@pytest.fixture
def venv(tmp_path):
    """A virtual environment and the Python that has made it, as folders look."""
    base, prefix = tmp_path / "base", tmp_path / "venv"
    write(base / "bin" / "python3.11", "#!", 0o755)
    write(base / "bin" / "pip", "not packed")
    write(base / "lib" / "libpython3.11.so.1.0", "elf")
    (base / "lib" / "libpython3.11.so").symlink_to("libpython3.11.so.1.0")
    write(base / "lib" / "python3.11" / "os.py", "os")
    write(base / "lib" / "python3.11" / "site-packages" / "pip.py", "not packed")
    write(base / "include" / "python3.11" / "Python.h", "header")
    write(prefix / "pyvenv.cfg", f"home = {base}/bin\ninclude-system-site-packages = false\n")
    write(prefix / "lib" / "python3.11" / "site-packages" / "torch.py", "torch")
    (prefix / "lib64").symlink_to("lib")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python3.11").symlink_to(base / "bin" / "python3.11")
    (prefix / "bin" / "python").symlink_to("python3.11")
    purelib = prefix / "lib" / "python3.11" / "site-packages"
    return Interpreter(prefix, base, VERSION, purelib, prefix / "bin" / "python")


def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def names(files):
    return {one.name: one.target or one.kind for one in files if one.kind != "folder"}


def test_an_environment_and_its_base_are_packed_and_led_to_each_other(venv):
    assert names(files_of(venv)) == {
        "env/pyvenv.cfg": "file",
        "env/lib64": "lib",
        "env/lib/python3.11/site-packages/torch.py": "file",
        "env/bin/python": "python3.11",
        "env/bin/python3.11": "../../base/bin/python3.11",
        "base/bin/python3.11": "file",
        "base/lib/libpython3.11.so": "libpython3.11.so.1.0",
        "base/lib/libpython3.11.so.1.0": "file",
        "base/lib/python3.11/os.py": "file",
        "base/include/python3.11/Python.h": "file",
    }


def test_packages_of_the_base_come_along_where_the_environment_sees_them(venv):
    write(venv.prefix / "pyvenv.cfg", "include-system-site-packages = true\n")

    assert "base/lib/python3.11/site-packages/pip.py" in names(files_of(venv))


def test_the_systems_own_python_is_no_environment():
    with pytest.raises(HpctrainError, match="is the system's own Python, which each node has"):
        interpreter("/usr/bin/python3")


def test_a_base_of_the_system_is_left_out(venv):
    system = Interpreter(venv.prefix, Path("/usr"), VERSION, venv.purelib, venv.executable)

    found = names(files_of(system))
    assert not any(name.startswith("base") for name in found)
    assert found["env/bin/python3.11"] == str(venv.base_prefix / "bin" / "python3.11")


def test_the_interpreter_is_asked():
    found = interpreter(sys.executable)

    assert (found.prefix, found.base_prefix) == (Path(sys.prefix), Path(sys.base_prefix))
    assert found.version == "{}.{}".format(*sys.version_info)
    with pytest.raises(HpctrainError, match="/no/python does not say where its files lie"):
        interpreter("/no/python")
    with pytest.raises(HpctrainError, match="does not say where its files lie"):
        interpreter("/bin/echo")


def test_conda_keeps_its_other_environments_to_itself(tmp_path):
    for name in ("conda-meta/history", "envs/other/x", "pkgs/torch/x", "lib/envs/x", "bin/python"):
        write(tmp_path / name, "x")
    conda = Interpreter(tmp_path, tmp_path, VERSION, tmp_path / "lib", tmp_path / "bin" / "python3")

    found = names(files_of(conda))

    assert found.keys() == {"env/conda-meta/history", "env/lib/envs/x", "env/bin/python"}
    write(tmp_path / "conda-meta" / "history", "x")


def test_links_out_of_the_environment_become_files_and_absolute_ones_inside_relative(
    venv, tmp_path
):
    write(tmp_path / "cache" / "numpy.py", "numpy")
    packages = venv.purelib
    (packages / "numpy.py").symlink_to(tmp_path / "cache" / "numpy.py")
    (packages / "inside.py").symlink_to(packages / "torch.py")
    (packages / "lost.py").symlink_to(tmp_path / "gone")
    os.mkfifo(packages / "fifo")

    found = {one.name.rpartition("/")[2]: one for one in files_of(venv)}

    assert (found["numpy.py"].kind, found["numpy.py"].size_bytes) == ("file", 5)
    assert (found["inside.py"].kind, found["inside.py"].target) == ("link", "torch.py")
    assert found["lost.py"].kind == "link"
    assert "fifo" not in found


def test_another_file_size_time_mode_or_compression_is_another_key(venv):
    torch = venv.purelib / "torch.py"
    os.utime(torch, ns=(0, 10**18))

    def key(compress="none"):
        return key_of(venv, files_of(venv), compress)

    first = key()
    assert key() == first
    assert len(first) == 32
    seen = {first, key("zstd")}
    torch.write_text("other")
    os.utime(torch, ns=(0, 10**18))
    assert key() == first  # nobody reads bytes: of the same size and time it is the same
    os.utime(torch, ns=(0, 10**18 + 1))
    seen.add(key())
    torch.chmod(0o755)
    seen.add(key())
    torch.write_text("longer than before")
    seen.add(key())
    write(venv.purelib / "new.py", "new")
    seen.add(key())
    (venv.purelib / "new.py").rename(venv.purelib / "renamed.py")
    seen.add(key())
    (venv.prefix / "lib64").unlink()
    (venv.prefix / "lib64").symlink_to("bin")
    seen.add(key())
    assert len(seen) == 8


def test_bytecode_is_packed_and_does_not_count(venv):
    before = key_of(venv, files_of(venv), "none")
    write(venv.purelib / "__pycache__" / "torch.cpython-311.pyc", "code")

    files = files_of(venv)

    assert key_of(venv, files, "none") == before
    assert any(one.is_bytecode for one in files)


def test_what_is_installed_editable_is_named(venv, tmp_path):
    (tmp_path / "checkout").mkdir()
    (venv.prefix / "src").mkdir()
    write(venv.purelib / "editable.pth", f"{tmp_path}/checkout\nimport os\n{venv.prefix}/src\n")
    write(venv.purelib / "gone.pth", f"{tmp_path}/gone\n")

    assert read_in_place(venv) == [f"{tmp_path}/checkout"]


def test_what_it_takes_on_a_disk_counts_whole_blocks(venv):
    files = [one for one in files_of(venv) if one.kind == "file"][:2]

    assert unpacked_bytes(files) == 2 * 2 * 4096
