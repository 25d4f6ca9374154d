"""An image for Charliecloud, made in a second: a root of its own, and not one command of SLURM's.

A folder with a shell, a few programs and the libraries that Python and torch need, and a system's
name of its own (`NAME` in /etc/os-release). They come from the Debian of another SLURM version
where tests/support/slurm_system.sh has made one (another C library than the host's), from the host
elsewhere. Python, its packages and this checkout are no part of it: `mounts()` brings them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

NAME = "hpctrain-test-image"
CHECKOUT = Path(__file__).parents[2]
RUNTIME = "ch-run"
_SYSTEMS = Path(os.environ.get("HPCTRAIN_SLURM_SYSTEMS", "/var/cache/hpctrain/slurm-systems"))
_PROGRAMS = ("sh", "bash", "cat", "env", "hostname", "id", "ls", "sleep", "uname")
_FOLDERS = ("dev", "etc", "proc", "sys", "tmp", "run", "root", "home", "var/tmp", "usr/bin")
_BOUND = ("passwd", "group", "hosts", "resolv.conf", "machine-id")
"""Of /etc: Charliecloud puts the host's, or its own, over them."""


@cache
def missing() -> list[str]:
    """What this machine lacks to start such an image; empty where it can."""
    absent = [name for name in (RUNTIME, "ldd") if shutil.which(name) is None]
    if absent:
        return absent
    with tempfile.TemporaryDirectory(prefix="hpctrain-image-") as folder:
        image = make_image(Path(folder) / "image")
        done = subprocess.run(
            [RUNTIME, str(image), "--", "sh", "-c", ":"],
            env=os.environ | {"USER": "root"},
            capture_output=True,
            text=True,
            check=False,
        )
    return [] if done.returncode == 0 else [f"namespaces ({done.stderr.strip()})"]


def mounts() -> list[str]:
    """Folders of the host that Python here is made of, and this checkout."""
    parts = {sys.prefix, sys.base_prefix, *map(os.path.realpath, (sys.prefix, sys.base_prefix))}
    parts |= {str(CHECKOUT), *filter(os.path.isdir, sys.path)}
    paths = sorted(Path(part).resolve() for part in parts if part not in {"", "/", "/usr"})
    inner = {path for path in paths if any(above in path.parents for above in paths)}
    return [str(path) for path in paths if path not in inner]


def make_image(image: Path) -> Path:
    """Make the image there; it is read-only once it runs, so places for all mounts are in it."""
    source = next((s for s in sorted(_SYSTEMS.glob("*")) if (s / ".prepared").exists()), Path("/"))
    for name in (*_FOLDERS, *(part.lstrip("/") for part in [*mounts(), tempfile.gettempdir()])):
        (image / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        (image / "usr" / name).mkdir(exist_ok=True)
        (image / name).symlink_to(f"usr/{name}")
    for name in _BOUND:
        (image / "etc" / name).touch()
    (image / "etc/os-release").write_text(f'ID={NAME}\nNAME="{NAME}"\n')
    programs = [source / "usr/bin" / name for name in _PROGRAMS]
    for program in programs:
        shutil.copy2(program, image / "usr/bin" / program.name)
    for library in _libraries(source, programs):
        place = image / library.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, place)
    return image


def _libraries(source: Path, programs: list[Path]) -> list[Path]:
    """What the programs and Python load, as far as it is the source's and not Python's own."""
    linker = _linker(source)
    folder = source / "usr/lib" / sysconfig.get_config_var("MULTIARCH")
    python = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    torch = [Path(part) / "torch/lib" for part in sys.path]
    files = [*programs, Path(sys.executable).resolve()]
    files += [path for path in python.glob("*.so") if "tkinter" not in path.name]
    files += [path for part in torch for path in part.glob("libtorch_[cp]*.so")]
    needed = {linker}
    for file in files:
        command = [str(linker), "--library-path", str(folder), "--list", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        words = [line.split() for line in text.splitlines()]
        found = [Path(line[2]) for line in words if len(line) > 2 and line[1] == "=>"]
        needed |= {path for path in found if folder in path.parents}
    return sorted(needed)


def _linker(source: Path) -> Path:
    text = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout
    named = next(word for word in text.split() if Path(word).name.startswith("ld-"))
    return source / named.lstrip("/")
