"""Which ports the agents of a job meet on: derived from the job, and checked to be free."""

from __future__ import annotations

import errno
import socket
import zlib

from hpctrain.errors import ClusterError

PORT_BASE = 20000
PORT_BLOCKS = 1500
PORTS = 8
"""Ports a job may use side by side. 20000..31999 lies below Linux' ephemeral range, from which any
outgoing connection may take a port at any moment (enroot#243)."""


def first_port(job_id: str, restarts: int, turn: int = 0) -> int:
    """The first of PORTS ports for this start of this job; the same on every node.

    The restart count takes part, since a port is not free at once after a requeue (TIME_WAIT).
    """
    block = zlib.crc32(f"{job_id}/{restarts}".encode()) + turn
    return PORT_BASE + PORTS * (block % PORT_BLOCKS)


def free_port(job_id: str, restarts: int) -> int:
    """The first port of a block that is free on this node, starting from the job's own.

    Raises:
        ClusterError: none of the blocks is free.
    """
    for turn in range(PORT_BLOCKS):
        port = first_port(job_id, restarts, turn)
        if all(_is_free(port + n) for n in range(PORTS)):
            return port
    raise ClusterError(
        f"no {PORTS} free ports in a row between {PORT_BASE} and {PORT_BASE + PORTS * PORT_BLOCKS} "
        f"on {socket.gethostname()}: see what listens there with `ss -ltn`"
    )


def _is_free(port: int) -> bool:
    """Whether nobody has the port, over IPv4 or IPv6: of two, clients may reach the other one."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # a kernel without IPv6
            continue
        with probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    return False
    return True
