"""Real agents on simulated machines: torch's part of them, and what they import, stood in.

What decides is the product's: `NodeAgent`, `InPlaceAgent`, both rendezvous, both sides of the
liveness channel, the watch for hangs and the deadline of a stop.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import api as torch_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from hpctrain.core.base import clock
from hpctrain.core.base.env import (
    HPCTRAIN_ATTEMPT,
    HPCTRAIN_ATTEMPT_DIR,
    HPCTRAIN_STARTS,
    HPCTRAIN_STOP_FILE,
)
from hpctrain.core.base.records import FailureReport
from hpctrain.errors import ControlLost
from hpctrain.node.agent import (
    coordinator,
    hang_watch,
    in_place,
    node,
    node_reports,
    ranks,
    rendezvous,
    rounds,
    stop_notice,
)
from hpctrain.node.agent.resume import StopHeard
from hpctrain.node.agent.rounds import RoundPart
from hpctrain.node.control.heartbeat import PHASES, HeartbeatSeen
from tests.support.simulation.kernel import EPOCH_S, MachineClock
from tests.support.simulation.stores import PrefixStore, Store, StoreProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from hpctrain.node.agent.rounds import RoundEnd
    from hpctrain.node.hangs.evidence import RankEvidence
    from tests.support.simulation.job import Job, Node
    from tests.support.simulation.ranks import Rank

READ_S = 0.3
"""So long at most is read what ranks go on from."""
LOOK_S = 0.2
"""A look at the ranks of a node takes up to so long."""


class NoPath:
    """A folder that is on no disk."""

    def __truediv__(self, name: str) -> NoPath:
        return self

    def mkdir(self, **_: Any) -> None:
        """Nothing is made."""

    def exists(self) -> bool:
        """Nothing is there."""
        return False

    def stat(self) -> Any:
        """Nothing is there."""
        raise FileNotFoundError

    def with_name(self, _: str) -> NoPath:
        """Nor that."""
        return self


NO_PATH = NoPath()


class Torch(LocalElasticAgent):
    """What torch does below a `NodeAgent`: it starts ranks, watches and ends them."""

    job: Job
    place: Node

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        numbers = [worker.global_rank for worker in worker_group.workers]
        told = {HPCTRAIN_ATTEMPT, HPCTRAIN_ATTEMPT_DIR, HPCTRAIN_STARTS, HPCTRAIN_STOP_FILE}
        assert told <= self.place.environ.keys(), "ranks are not told what they need"
        assert self._control.has_begun, "nobody carries the ranks' agreement"
        self._control.has_begun = False
        number, size = self.attempt_number, worker_group.workers[0].world_size
        processes = self.job.start_ranks(self.place, number, numbers, size)
        self._pcontext: Any = SimpleNamespace(
            _pc=SimpleNamespace(processes=processes),
            _worker_finished_event=SimpleNamespace(set=lambda: None),
            _ret_vals={
                local: SimpleNamespace(empty=lambda rank=rank: rank.state != "returned")
                for local, rank in enumerate(processes)
            },
        )
        return {local: rank.pid for local, rank in enumerate(processes)}

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        processes: list[Rank] = self._pcontext._pc.processes
        failed = [rank for rank in processes if rank.exitcode]
        if failed:
            result = {failed[0].number: SimpleNamespace(exitcode=failed[0].exitcode)}
            for rank in processes:
                rank.kill()
            return RunResult(state=WorkerState.FAILED, failures=result)
        is_over = all(rank.exitcode == 0 for rank in processes)
        return RunResult(state=WorkerState.SUCCEEDED if is_over else WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: Any) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        if self._pcontext is not None:
            for rank in self._pcontext._pc.processes:
                rank.kill()
            self.job.simulation.may_switch()


class _Told:
    """Tells the job what its agents have come to."""

    job: Job
    place: Node

    def _watch_round(self, parts: Sequence[RoundPart]) -> RoundEnd:
        end: RoundEnd = super()._watch_round(parts)
        self.job.verdict(self.place, self._meeting_place, end)
        return end


class Agent(_Told, node.NodeAgent, Torch):
    """`NodeAgent`."""


class StayingAgent(_Told, node.InPlaceAgent, Torch):
    """`InPlaceAgent`."""


class Control(RoundPart):
    """As `hpctrain.node.agent.control.NodeControl`: nothing is agreed on here."""

    def __init__(self, job: Job) -> None:
        self._job, self._node = job, job.here()
        self.pids: list[int] = []
        self._has_ended = self.has_begun = False
        self.copies_to_peer = False
        self.folder = NO_PATH

    def begin(self, *_: Any, **__: Any) -> None:
        """See the real one; so below."""
        self._job.simulation.may_switch()
        self._has_ended, self.has_begun = False, True
        if self._node.lacks_control:
            self._node.lacks_control = False
            raise ControlLost("no port is free")

    def join(self, *_: Any, **__: Any) -> None:
        self._job.simulation.may_switch()

    def tick(self) -> None:
        self.failure()

    def failure(self) -> FailureReport | None:
        if self._node.control_died_s is None or not self._node.round_ranks():
            return None
        self._has_ended = True
        first = self._node.round_ranks()[0].number
        why = "the process that carries the ranks' agreement has ended"
        return FailureReport(
            first, self._node.name, "signal", why, time=EPOCH_S + self._node.control_died_s
        )

    def memory_line(self, attempt: int) -> _Line:
        line = _Line(attempt)
        self._node.lines.append(line)
        return line

    def hand_over(self) -> str:
        return ""

    def stop(self) -> None:
        pass


class _Line:
    """To a replica server of copies."""

    def __init__(self, attempt: int) -> None:
        self.attempt, self.is_closed = attempt, False

    def close(self) -> None:
        """Let go."""
        self.is_closed = True


class CopySaver:
    """As `hpctrain.node.agent.copies_to_disk.CopySaver`: says what it would do."""

    def __init__(self, job: Job, *_: Any, **told: Any) -> None:
        self._job, self._told = job, told

    def save(self) -> str | None:
        """See the real one."""
        job, told = self._job, self._told
        job.simulation.sleep(job.simulation.random.uniform(0.0, 0.5))
        why = told["why_not"]()
        job.copied.append((job.here().number, told["place"], tuple(told["living"]), why))
        return None if why else "copies are saved"


class StopFile:
    """As `hpctrain.node.agent.stop_notice.StopFile`."""

    path = "/stop"

    def __init__(self, job: Job) -> None:
        self._job, self._node = job, job.here()
        self.cause: Any = None
        self._node.stop_files += 1

    def write(self, cause: Any) -> None:
        """See the real one; so below."""
        if self.cause is None:
            self.cause = cause
            if self._job.hears == "file":
                self._job.stop_ranks(self._node, str(cause))

    def renew(self) -> None:
        self.cause = None

    def remove(self) -> None:
        self._node.stop_files -= 1


class _Orphans:
    def __init__(self, job: Job) -> None:
        self._job, self._node = job, job.here()

    def end(self, spare: Collection[int] = ()) -> None:
        del spare
        self._job.simulation.may_switch()


def _heartbeats(job: Job, here: Node) -> list[HeartbeatSeen]:
    return [
        HeartbeatSeen(
            rank.number,
            rank.pid if rank.state != "starts" else 0,
            rank.step,
            PHASES[rank.phase] if rank.state != "starts" else "",
            rank.step == 0,
            None,
            round(rank.since_s * 1e9) + rank.frame,
            0.0,
        )
        for rank in here.round_ranks()
    ]


def _look(job: Job, here: Node, seen: Sequence[tuple[int, RankEvidence]]) -> list[RankEvidence]:
    job.looks_at_s.append(job.simulation.now_s)
    job.simulation.sleep(job.simulation.random.uniform(0.0, LOOK_S))
    by_number = {rank.number: rank for rank in here.round_ranks()}
    return [
        by_number[one.rank].attempt.evidence(by_number[one.rank])
        for _, one in seen
        if one.rank in by_number
    ]


def _choose(
    job: Job, look: Callable[[Callable[[int], None]], Any], why_not: Callable[[], str]
) -> Any:
    """What is read is there after a while; a stop is heard meanwhile."""
    until_s = job.simulation.now_s + job.simulation.random.uniform(0, READ_S) + job.reads_s
    while job.simulation.now_s < until_s:
        job.simulation.sleep(min(0.1, until_s - job.simulation.now_s))
        if why := why_not():
            raise StopHeard(why)
    return look(lambda _: None)


def _collect(job: Job, codes: dict[int, int], here: Node) -> list[Any]:
    found = []
    attempt = here.round_ranks()[0].attempt
    for rank, code in codes.items():
        report = attempt.reports.get(rank)
        found.append(report or ranks._from_exit_code(rank, code, here.machine.name))
    return found


def _wait(job: Job, sentinels: Sequence[Any], timeout: float) -> None:
    job.simulation.wait(sentinels, timeout * job.poll_stretch)


def _failure_path(job: Job, number: int) -> Any:
    here = job.here()
    attempt = here.round_ranks()[0].attempt
    return SimpleNamespace(exists=lambda: number in attempt.reports)


class _Os:
    """`os` with an environment of each machine's own."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def environ(self) -> dict[str, str]:
        return self._job.here().environ

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def stand_ins(job: Job) -> list[tuple[Any, str, Any]]:
    """Module, name, and what stands there while a simulation runs."""
    own_os = _Os(job)
    here = job.here

    def store(address: str, port: int, *_: Any, timeout: Any, **__: Any) -> Store:
        return Store(job, address, port, timeout)

    return [
        (rendezvous, "TCPStore", store),
        (rendezvous, "limit_answers", lambda _port: None),
        (rendezvous, "PrefixStore", PrefixStore),
        (rendezvous, "StoreProcess", partial(StoreProcess, job)),
        (static_tcp_rendezvous, "PrefixStore", PrefixStore),
        (torch_agent, "record", lambda *_args, **_options: None),
        (in_place, "TCPStore", store),
        (in_place, "limit_answers", lambda _port: None),
        (in_place, "PrefixStore", PrefixStore),
        (in_place, "connections_to", lambda _port: [_Connection(here().connections[-1])]),
        (node, "CopySaver", partial(CopySaver, job)),
        (node, "os", own_os),
        (rounds, "multiprocessing", SimpleNamespace(
            connection=SimpleNamespace(wait=lambda them, timeout: _wait(job, them, timeout)))),
        (node, "Orphans", partial(_Orphans, job)),
        (node, "notifying", list),
        (stop_notice, "os", own_os),
        (stop_notice, "arrivals", lambda: tuple(here().arrivals)),
        (node, "kept", nullcontext),
        (node, "LogIndexer", lambda *_args, **_options: RoundPart()),
        (node_reports, "collect", lambda _folder, codes, _name: _collect(job, codes, here())),
        (node_reports, "failure_path", lambda _folder, number: _failure_path(job, number)),
        (stop_notice, "StopFile", partial(StopFile, job)),
        (coordinator, "listens", lambda _pid: job.listens),
        (stop_notice, "send_term", lambda pids: job.send_term(here(), pids)),
        (coordinator, "choose", partial(_choose, job)),
        (node_reports, "LifeWatch", partial(
            node_reports.LifeWatch, look_at=job.uses)),
        (hang_watch, "Board", SimpleNamespace(open=lambda _path: _board(here()))),
        (hang_watch, "heartbeat", SimpleNamespace(
            read=lambda _board: _heartbeats(job, here()))),
        (hang_watch, "read_counts", lambda _board: job.counts(here())),
        (hang_watch, "uses", job.used),
        (hang_watch, "look", lambda _folder, seen: _look(job, here(), seen)),
        (hang_watch, "replace_text", lambda _path, text: job.wrote(text)),
        (stop_notice, "stop_is_asked", lambda _request, _job_id: job.is_stop_asked),
    ]  # fmt: skip


class _Board:
    def __init__(self, here: Node) -> None:
        self._node = here
        here.boards += 1

    def close(self) -> None:
        """Let go."""
        self._node.boards -= 1


def _board(here: Node) -> _Board:
    if here.lacks_board:
        raise OSError("there is no board")
    return _Board(here)


class _Connection:
    """What the kernel calls a connection to a store."""

    def __init__(self, store: Store) -> None:
        self.cut = store.cut

    def close(self) -> None:
        pass


class _Warnings(logging.Handler):
    """Keeps what agents warn of."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        task = self._job.simulation.current
        who = -1 if task is None or task.machine is None else task.machine.number
        self._job.warned.append((who, record.getMessage()))


@contextmanager
def installed(job: Job) -> Iterator[None]:
    """All stand-ins in their places."""
    log = logging.getLogger("hpctrain")
    level, handlers, propagates = log.level, log.handlers, log.propagate
    log.handlers, log.propagate = [_Warnings(job)], False
    log.setLevel(logging.INFO)
    before = []
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    try:
        for module, name, value in stand_ins(job):
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        with clock.use(MachineClock(job.simulation)):
            yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)
        log.handlers, log.propagate = handlers, propagates
        log.setLevel(level)
