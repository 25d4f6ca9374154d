"""A network of its own for each process that runs tests: any port is free there.

Only root may make one. Others look for free ports (`tests.support.ports`), and can lose the race
for one. Nothing in tests needs the outside: packages are installed from files.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
IFF_UP = 1
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
        for name, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.255")):
            fcntl.ioctl(control, name, _request("lo:1", _sockaddr(value)))
    return True


def _own_address() -> str:
    """The address of this machine's name: gloo binds to it.

    There has to be one that is no loopback's: else getaddrinfo finds none for slurmdbd.
    """
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return SOME_ADDRESS
    return SOME_ADDRESS if found.startswith("127.") else found


def _request(name: str, value: bytes = b"") -> bytes:
    """A struct ifreq."""
    return struct.pack("16s24s", name.encode(), value)


def _sockaddr(address: str) -> bytes:
    """A struct sockaddr_in."""
    return struct.pack("hH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
