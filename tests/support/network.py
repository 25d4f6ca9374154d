"""A network of its own for each process that runs tests: any port is free there.

Only root may make one. Others look for free ports (`tests.support.ports`), and can lose the race
for one. Nothing in tests needs the outside: packages are installed from files.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import threading
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
IFF_UP = 1
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
SOME_ADDRESS = "192.0.2.1"
"""Of the block for documentation, which nobody has."""


def enter_own() -> bool:
    """Move this thread, and whatever it starts from now on, to a network of loopback alone.

    Call it on the main thread, before anything is bound: older threads and sockets stay behind.

    Returns:
        Whether this process may do that.
    """
    assert threading.current_thread() is threading.main_thread(), "/proc/net would be another's"
    address = _own_address()
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() != 0 or libc.unshare(CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(control, SIOCGIFFLAGS, _request("lo")))
        fcntl.ioctl(control, SIOCSIFFLAGS, _request("lo", struct.pack("h", flags | IFF_UP)))
        own = _device(host_interface()) or "lo:1"
        for alias, mine in ((own, address), ("lo:2", _name_server())):
            if not mine.startswith("127."):
                fcntl.ioctl(control, SIOCSIFADDR, _request(alias, _sockaddr(mine)))
                fcntl.ioctl(control, SIOCSIFNETMASK, _request(alias, _sockaddr("255.255.255.255")))
        if own != "lo:1":
            fcntl.ioctl(control, SIOCSIFFLAGS, _request(own, struct.pack("h", IFF_UP)))
    _serve_names()
    return True


def host_interface() -> str:
    """The machine's first interface besides loopback; "" for none.

    /sys goes on showing the machine's interfaces. One of that name here makes both agree, for
    tests of what a node's interfaces are.
    """
    names = sorted(path.name for path in Path("/sys/class/net").glob("*") if path.is_dir())
    return next((name for name in names if name != "lo"), "")


def _device(name: str) -> str:
    """Make a tunnel of that name, which lasts as long as this process; "" where none can be."""
    try:
        tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(tunnel, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        return ""
    return name


def _own_address() -> str:
    """The address of this machine's name: gloo binds to it.

    There has to be one that is no loopback's: else getaddrinfo finds none for slurmdbd.
    """
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return SOME_ADDRESS
    return SOME_ADDRESS if found.startswith("127.") else found


def _name_server() -> str:
    """The first name server that getaddrinfo asks."""
    path = Path("/etc/resolv.conf")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("nameserver ") and "." in line]
    return found[0] if found else "127.0.0.1"


def _serve_names() -> None:
    """Answer that no name is known, in a process that ends with this one.

    Without an answer each look-up takes its time and is "try again", of which torch warns.
    """
    lives, _mine = os.pipe()  # nobody writes: its end is this process's
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind((_name_server(), 53))
    child = os.fork()
    if child == 0:
        if os.fork() == 0:  # it is no child of this process, which may await all it has
            os.setsid()
            os.closerange(3, min(lives, names.fileno()))
            os.close(_mine)
            _answer(names, lives)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(lives)
    names.close()


def _answer(names: socket.socket, lives: int) -> None:
    while True:
        ready, _, _ = select.select([names, lives], [], [])
        if lives in ready:
            return
        asked, address = names.recvfrom(512)
        header = asked[:2] + b"\x81\x83" + asked[4:6] + bytes(6)  # no such domain
        names.sendto(header + asked[12:], address)


def _request(name: str, value: bytes = b"") -> bytes:
    """A struct ifreq."""
    return struct.pack("16s24s", name.encode(), value)


def _sockaddr(address: str) -> bytes:
    """A struct sockaddr_in."""
    return struct.pack("hH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
