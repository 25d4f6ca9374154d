"""What the ranks' agreement costs: by gloo groups against leases, at 2 to 8 ranks of 1 and 2 nodes.

For each: CPU of this process a step of 20 ms, all threads, less that of the same sleeps without;
the loop's own thread in it, less the probe's own; milliseconds from a notice on one rank to the
last rank's agreed stop, at steps of 20 ms and of 1 s, the median and the longest of some; and open
sockets of a rank. Ranks and nodes' processes share this machine.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

STEPS = 500
STEP_S = 0.02
NOTICES = {STEP_S: 8, 1.0: 4}


def cost() -> tuple[float, float, int]:
    """Microseconds of CPU a step: of the process, and of the loop's thread; open sockets."""
    from hpctrain.core.world import apart
    from hpctrain.train.joining_ranks import join_world
    from hpctrain.train.runtime.agreement import NOTHING, agreement_of

    world = join_world()
    beside = apart(world, 60)  # as saves have it
    assert beside.control is not None
    beside.control.gather(0)
    agreement = agreement_of(world)
    for _ in range(20):
        agreement.tick(NOTHING)
        time.sleep(STEP_S)
    began, probe = time.process_time(), 0.0
    for _ in range(STEPS):
        before = time.thread_time()  # asking the time costs as much as a tick, behind a sleep
        probe += time.thread_time() - before
        time.sleep(STEP_S)
    bare, in_loop = time.process_time() - began, -probe
    began = time.process_time()
    for _ in range(STEPS):
        before = time.thread_time()
        agreement.tick(NOTHING)
        in_loop += time.thread_time() - before
        time.sleep(STEP_S)
    spent = time.process_time() - began - bare
    sockets = sum(path.is_socket() for path in list(Path("/proc/self/fd").iterdir()))
    return spent / STEPS * 1e6, in_loop / STEPS * 1e6, sockets


def notice(step_s: float, seed: int) -> tuple[float, float]:
    """When this rank heard, and when it stopped; one rank hears, in the middle of a step."""
    import threading

    from hpctrain.train.joining_ranks import join_world
    from hpctrain.train.runtime.agreement import STOP_TERM, StopRequest, agreement_of

    world = join_world()
    agreement = agreement_of(world)
    plan = random.Random(seed)  # noqa: S311 - of a benchmark
    victim, after_s = plan.randrange(world.world_size), plan.uniform(3, 5) * max(step_s, 0.2)
    heard: list[float] = []

    def hear() -> None:
        heard.append(time.monotonic())
        agreement.wish(STOP_TERM)

    if world.rank == victim:
        threading.Timer(after_s, hear).start()
    while agreement.tick(StopRequest(STOP_TERM if heard else 0)).cause is None:
        time.sleep(step_s)
    return (heard[0] if heard else 0.0), time.monotonic()


def main() -> None:
    """Print a line for each number of ranks and kind of agreement."""
    from tests.support.gloo import launch

    for ranks in (2, 4, 8):
        for tree in (0, 1, 2):
            costs = launch(cost, ranks, tree=tree)
            spent, in_loop, sockets = (statistics.median(row) for row in zip(*costs, strict=True))
            line = f"{ranks} ranks, {f'{tree} nodes' if tree else 'gloo':7}: {spent:6.1f} us a step"
            line += f", {in_loop:5.1f} us in the loop; {sockets:.0f} sockets; notice to stop"
            for step_s, count in NOTICES.items():
                taken = []
                for seed in range(count):
                    times = launch(notice, ranks, tree=tree, step_s=step_s, seed=seed)
                    heard = max(heard for heard, _ in times)
                    taken.append((max(stopped for _, stopped in times) - heard) * 1e3)
                line += f", {statistics.median(taken):.0f} ms (at most {max(taken):.0f})"
                line += f" at {step_s:g} s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
