"""Connections between simulated machines: in order, with delays, cut off and healed.

Who dies closes his connections; who loses power closes nothing; who stands still answers later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.simulation.kernel import Bell

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.simulation.kernel import Machine, Simulation


class Network:
    """Between the machines of a job.

    Attributes:
        changed: Rings when somebody can be reached again, or not any more.
    """

    def __init__(self, simulation: Simulation, *, delay_s: float = 0.001) -> None:
        self.simulation, self.delay_s = simulation, delay_s
        self.changed = Bell()
        self._cut: set[frozenset[int]] = set()
        self._held: list[tuple[Channel, Callable[[], None]]] = []

    def cut(self, one: Machine, other: Machine) -> None:
        """Nothing comes through between both until it heals."""
        self.simulation.note(f"{one} and {other} are cut off")
        self._cut.add(frozenset((one.number, other.number)))

    def heal(self) -> None:
        """All that was sent meanwhile comes."""
        self.simulation.note("the network heals")
        self._cut.clear()
        held, self._held = self._held, []
        for channel, deliver in held:
            channel.send(deliver)
        self.simulation.ring(self.changed)

    def reaches(self, one: Machine, other: Machine) -> bool:
        """Whether a question is answered now."""
        is_cut = frozenset((one.number, other.number)) in self._cut
        return not is_cut and other.has_power and not other.is_frozen

    def is_cut(self, one: Machine, other: Machine) -> bool:
        """Whether nothing comes through between both."""
        return frozenset((one.number, other.number)) in self._cut

    def hold(self, channel: Channel, deliver: Callable[[], None]) -> None:
        """Deliver as soon as the network heals."""
        self._held.append((channel, deliver))


class Channel:
    """One direction of a connection: what is sent arrives in its order."""

    def __init__(self, network: Network, sender: Machine, receiver: Machine) -> None:
        self._network, self._sender, self._receiver = network, sender, receiver
        self._last_s = 0.0

    def send(self, deliver: Callable[[], None]) -> None:
        """Have something happen at the other end."""
        network, simulation = self._network, self._network.simulation
        if not self._sender.has_power:
            return
        if network.is_cut(self._sender, self._receiver):
            network.hold(self, deliver)
            return
        delay_s = simulation.random.expovariate(1 / network.delay_s)
        self._last_s = max(self._last_s + 1e-9, simulation.now_s + delay_s)
        simulation.at(self._last_s, deliver, self._receiver)


class End:
    """An end of a connection, as `hpctrain.node.control.endpoint.Endpoint` is one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.peer: End | None = None
        self.is_open = True
        self.on_message: Callable[[Any, bytes], None] = lambda _end, _message: None
        self.on_end: Callable[[Any, str], None] = lambda _end, _why: None

    def say(self, message: bytes) -> None:
        """Send it."""
        if self.is_open:
            self._channel.send(lambda: self._other._hear(message))

    def close(self) -> None:
        """Send what was said, and end it; this side hears no more."""
        if self.is_open:
            self.is_open = False
            self._channel.send(self._other._ended)

    @property
    def _other(self) -> End:
        assert self.peer is not None
        return self.peer

    def _hear(self, message: bytes) -> None:
        if self.is_open:
            self.on_message(self, message)

    def _ended(self) -> None:
        if self.is_open:
            self.is_open = False
            self.on_end(self, "it has closed the connection")


def connected(network: Network, one: Machine, other: Machine) -> tuple[End, End]:
    """Both ends of a new connection."""
    ends = End(Channel(network, one, other)), End(Channel(network, other, one))
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    return ends
