"""What another node has written just now, seen although this node's client of the disk caches.

Clients of NFS keep for up to a minute what they know of a folder: its list, and which names are not
in it, however often one asks. Opening a file that is there asks the server (close-to-open), as does
every change of one's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from hpctrain.base.files import all_of, plain_descriptor, read_text

if TYPE_CHECKING:
    from pathlib import Path


def look_anew(*folders: Path) -> None:
    """Make this node forget what it knew of folders, a parent before what is in it.

    A name is made there and taken away, which lets the client ask the server. Where that cannot be,
    what is listed may be a minute old; most file systems are coherent without it.
    """
    for folder in folders:
        name = folder / f".look-{socket.gethostname()}"
        with contextlib.suppress(OSError):
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            name.unlink()


def left_text(path: Path) -> str:
    """What a file says that another node may leave at any moment; "" while there is none.

    It is opened so that it would be made, which the server decides: a client that has once been
    told that there is no such file believes it. So it may be there empty from then on.

    Raises:
        OSError: it is there and cannot be read.
    """
    # Nothing else asks the server and leaves no empty file: a list of the folder may be as old as
    # the word that there is no such file, and a name of our own, made and taken away, is two
    # changes of the folder where this is one question, for each run twice a second.
    try:
        descriptor = plain_descriptor(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError:  # no room for a name, or a folder that may only be read
        with contextlib.suppress(FileNotFoundError):
            return read_text(path)
        return ""
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor has no path
        return all_of(file, path).decode(errors="replace")
