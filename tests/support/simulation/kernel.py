"""One clock, one order of events: tasks of a simulated job, of which one runs at a time.

A task is a thread of its own that runs real code. Whenever that code waits, sleeps or speaks to
another machine it comes in here, and the next event in simulated time runs instead. Ties and delays
are drawn from the seed, so the same seed is the same run. Nothing waits for the real clock.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from typing import TYPE_CHECKING, Any

from tests.support.clocks import THE_MACHINES, other_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpctrain.core.base.clock import Waitable

EPOCH_S = 1_790_000_000.0
"""What the clocks on the wall show as a simulation begins."""


class Killed(BaseException):
    """This task's process is gone."""


class Stuck(Exception):
    """A simulation did not come to its end within its bound."""


class Machine:
    """A node: its processes stand still, or are gone, together.

    Attributes:
        number: Its own.
        name: Its own.
        is_frozen: None of its processes runs; its kernel answers.
        has_power: Else nothing answers, and nothing of its connections is closed.
        ahead_s: Its clock on the wall, before the true one.
        booted_s: What its monotonic clock shows as the simulation begins.
        slowness_s: So late a task of it may wake up.
    """

    def __init__(self, number: int, name: str, rng: random.Random) -> None:
        self.number, self.name = number, name
        self.is_frozen, self.has_power = False, True
        self.ahead_s = rng.uniform(-0.05, 0.05)
        self.booted_s = rng.uniform(1_000.0, 100_000.0)
        self.slowness_s = 0.0
        self.held: list[_Event] = []

    def __repr__(self) -> str:
        return self.name


class Bell:
    """What tasks wait for; whoever changes something rings it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Task, int]] = []


class Task:
    """A process of one thread."""

    def __init__(self, name: str, machine: Machine | None) -> None:
        self.name, self.machine = name, machine
        self.go = threading.Lock()
        self.go.acquire()
        self.ticket = 0
        self.is_killed = self.is_over = self.is_stopped = False
        self.result: Any = None
        self.thread: threading.Thread | None = None


class _Event:
    __slots__ = ("at_s", "call", "machine", "number", "task", "ticket", "tie")

    def __init__(  # noqa: PLR0917 - made in two places, very often
        self,
        at_s: float,
        tie: float,
        number: int,
        machine: Machine | None,
        call: Callable[[], None] | None,
        task: Task | None,
        ticket: int,
    ) -> None:
        self.at_s, self.tie, self.number = at_s, tie, number
        self.machine, self.call, self.task, self.ticket = machine, call, task, ticket

    def __lt__(self, other: _Event) -> bool:
        return (self.at_s, self.tie, self.number) < (other.at_s, other.tie, other.number)


class Simulation:
    """A run of one seed.

    Attributes:
        random: All that is left to chance.
        now_s: Simulated seconds since it began.
        current: The task that runs; None while something happens that belongs to none.
        trace: What has happened, in words, for a failure's message.
        is_other: Whether a thread of the process has no part in it.
    """

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        self.random = random.Random(f"simulation {seed}")
        self.now_s = 0.0
        self.current: Task | None = None
        self.trace: list[str] = []
        self.switches = 0
        self.is_other = other_threads()
        self._heap: list[_Event] = []
        self._numbers = itertools.count()
        self._main = threading.Lock()
        self._main.acquire()
        self._bound_s = 0.0
        self._until: Callable[[], bool] = lambda: False
        self._failure: BaseException | None = None
        self._tasks: list[Task] = []
        self._is_closing = False

    # ---- what scenarios do

    def note(self, *words: object) -> None:
        """Write down what happens."""
        who = "" if self.current is None else f" {self.current.name}:"
        self.trace.append(f"{self.now_s:9.3f}{who} {' '.join(map(str, words))}")

    def at(
        self, at_s: float, call: Callable[[], None], machine: Machine | None = None
    ) -> Callable[[], None]:
        """Have something happen then; where a machine stands still then, as it goes on.

        Returns:
            Takes it back.
        """
        event = _Event(
            max(at_s, self.now_s),
            self.random.random(),
            next(self._numbers),
            machine,
            call,
            None,
            0,
        )
        heapq.heappush(self._heap, event)

        def take_back() -> None:
            event.call = None

        return take_back

    def after(
        self, delay_s: float, call: Callable[[], None], machine: Machine | None = None
    ) -> Callable[[], None]:
        """See `at`."""
        return self.at(self.now_s + delay_s, call, machine)

    def start(self, name: str, body: Callable[[], Any], machine: Machine | None = None) -> Task:
        """Begin a task."""
        task = Task(name, machine)
        task.thread = threading.Thread(target=self._live, args=(task, body), daemon=True, name=name)
        self._tasks.append(task)
        task.thread.start()
        self._wake(task, self.now_s + self.random.uniform(0, 0.01))
        return task

    def kill(self, task: Task) -> None:
        """End a task's process where it stands; its code does not hear of it."""
        task.is_killed = True
        task.ticket += 1
        if task is self.current:
            raise Killed

    def freeze(self, machine: Machine) -> None:
        """Nothing of it runs any more."""
        self.note(f"{machine} stands still")
        machine.is_frozen = True

    def thaw(self, machine: Machine) -> None:
        """It goes on: all that came meanwhile happens now."""
        self.note(f"{machine} goes on")
        machine.is_frozen = False
        held, machine.held = machine.held, []
        for number, event in enumerate(held):
            event.at_s = self.now_s + 1e-6 * number
            event.tie = 0.0
            heapq.heappush(self._heap, event)

    def run(self, bound_s: float, until: Callable[[], bool] | None = None) -> None:
        """Go on until all tasks have ended, or `until` holds.

        Raises:
            Stuck: it did not come to that within the bound.
        """
        self._bound_s = bound_s
        self._until = until or (lambda: all(task.is_over or task.is_killed for task in self._tasks))
        self._give_away(None)
        self._main.acquire()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the threads of all tasks."""
        self._is_closing = True
        for task in self._tasks:
            if not task.is_over:
                task.is_killed = True
                task.go.release()
                assert task.thread is not None
                task.thread.join()

    # ---- what simulated code does

    def sleep(self, seconds: float) -> None:
        """Let time go by for the task that runs."""
        self.wait((), seconds)

    def wait(self, bells: Iterable[Bell], timeout_s: float | None) -> None:
        """Wait until one of them rings, at most so long."""
        task = self.current
        assert task is not None, "only a task can wait"
        if task.is_killed or self._is_closing:
            raise Killed
        for bell in bells:
            bell.waiting.append((task, task.ticket))
        if timeout_s is not None:
            self._wake(task, self.now_s + max(0.0, timeout_s) + self._late_s(task))
        self._give_away(task)
        task.ticket += 1
        if task.is_killed or self._is_closing:
            raise Killed

    def ring(self, bell: Bell) -> None:
        """Wake who waits for it."""
        waiting, bell.waiting = bell.waiting, []
        for task, ticket in waiting:
            if ticket == task.ticket:
                self._wake(task, self.now_s + self.random.uniform(0.0, 0.002))

    def may_switch(self, share: float = 0.2) -> None:
        """Let others go first now and then: between any two calls that others can see."""
        if self.random.random() < share:
            self.sleep(self.random.expovariate(1 / 0.002))

    # ---- the loop

    def _late_s(self, task: Task) -> float:
        slowness_s = task.machine.slowness_s if task.machine is not None else 0.0
        late_s = self.random.uniform(0.0, 0.001)
        return late_s + (self.random.uniform(0.0, slowness_s) if slowness_s else 0.0)

    def _wake(self, task: Task, at_s: float) -> None:
        event = _Event(
            at_s, self.random.random(), next(self._numbers), task.machine, None, task, task.ticket
        )
        heapq.heappush(self._heap, event)

    def _give_away(self, own: Task | None) -> None:
        """Run what comes next; returns once it is `own`'s turn, for None once it is another's.

        Events that belong to no task happen here, in whichever thread came.
        """
        self.current = None
        while True:
            target = self._next()
            if target is own and own is not None:
                self.current = own
                return
            self.switches += 1
            if target is None:
                self._main.release()
            else:
                self.current = target
                target.go.release()
            if own is not None:
                own.go.acquire()
            return

    def _next(self) -> Task | None:
        """The task whose turn it is; None for nobody's any more."""
        while self._failure is None and not self._until():
            event = heapq.heappop(self._heap) if self._heap else None
            if event is None or event.at_s > self._bound_s:
                waiting = [t.name for t in self._tasks if not (t.is_over or t.is_killed)]
                self._failure = Stuck(f"at {self.now_s:.1f} s these still wait: {waiting}")
                return None
            machine, task = event.machine, event.task
            if task is not None and (event.ticket != task.ticket or task.is_over):
                continue
            if task is None and event.call is None:
                continue
            if machine is not None and not machine.has_power:
                continue
            if machine is not None and (machine.is_frozen or (task and task.is_stopped)):
                machine.held.append(event)
                continue
            self.now_s = max(self.now_s, event.at_s)
            if task is not None:
                task.ticket += 1
                return task
            assert event.call is not None
            try:
                event.call()
            except Exception as error:  # noqa: BLE001 - told by `run`
                self._failure = error
        return None

    def _live(self, task: Task, body: Callable[[], Any]) -> None:
        task.go.acquire()
        try:
            if not task.is_killed:
                task.result = body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - told by `run`
            if not (self._is_closing or task.is_killed):
                self._failure = self._failure or error
        task.is_over = True
        if not self._is_closing:
            self._give_away(None)


class MachineClock:
    """A clock as `hpctrain.core.base.clock` takes it: that of the machine whose code runs.

    A thread that ran before the simulation, of an earlier test, has the real machine's.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def now(self) -> float:
        """Seconds since the epoch, by the machine's clock."""
        if self._simulation.is_other():
            return THE_MACHINES.now()
        machine = self._machine()
        return EPOCH_S + self._simulation.now_s + (machine.ahead_s if machine else 0.0)

    time = now

    def now_ns(self) -> int:
        """The same in nanoseconds."""
        return round(self.now() * 1e9)

    def monotonic(self) -> float:
        """Seconds since the machine was booted."""
        if self._simulation.is_other():
            return THE_MACHINES.monotonic()
        machine = self._machine()
        return self._simulation.now_s + (machine.booted_s if machine else 0.0)

    def monotonic_ns(self) -> int:
        """The same in nanoseconds."""
        return round(self.monotonic() * 1e9)

    def boottime(self) -> float:
        """For processes that only compare what they read themselves."""
        return self._simulation.now_s

    def sleep(self, seconds: float) -> None:
        """Let simulated time go by."""
        if self._simulation.is_other():
            THE_MACHINES.sleep(seconds)
        else:
            self._simulation.sleep(seconds)

    def wait(self, event: Waitable, timeout_s: float) -> bool:
        """Wait for an event that some other task sets."""
        if self._simulation.is_other():
            return THE_MACHINES.wait(event, timeout_s)
        until_s = self._simulation.now_s + timeout_s
        while not event.wait(0):
            if self._simulation.now_s >= until_s:
                return False
            self._simulation.sleep(min(0.05, timeout_s))
        return True

    def _machine(self) -> Machine | None:
        task = self._simulation.current
        return None if task is None else task.machine
