"""The loop whose time jumps: timers, sockets, other threads and plans are as in a real one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hpctrain.core.base import clock
from tests.support.clocks import ManualClock
from tests.support.jumping_loop import run_jumping

HOUR_S = 3600.0


def test_sleeps_are_in_the_clocks_time_and_in_order():
    hands, told = ManualClock(), []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        told.append((seconds, clock.monotonic() - began))

    async def main():
        await asyncio.gather(sleeper(2 * HOUR_S), sleeper(3.5), sleeper(HOUR_S))
        return asyncio.get_running_loop().time() - began

    began = hands.monotonic()
    assert run_jumping(main(), hands) == pytest.approx(2 * HOUR_S)
    assert [seconds for seconds, _ in told] == [3.5, HOUR_S, 2 * HOUR_S]
    assert [at for _, at in told] == pytest.approx([3.5, HOUR_S, 2 * HOUR_S])


def test_what_is_on_its_way_through_a_socket_arrives_before_time_passes():
    """A thousand times there and back, with a time limit of a tick of the clock's each."""
    hands, over = ManualClock(), asyncio.Event()

    async def echo(reader, writer):
        while piece := await reader.read(100):
            writer.write(piece)
        writer.close()
        over.set()

    async def main():
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for _ in range(1000):
                writer.write(b"x")
                async with asyncio.timeout(HOUR_S):
                    assert await reader.read(1) == b"x"
            writer.close()
            await over.wait()

    run_jumping(main(), hands)

    assert hands.passed_s == 0.0


def test_a_silent_socket_runs_into_the_time_limit():
    hands, silent = ManualClock(), []

    async def main():
        server = await asyncio.start_server(lambda _, end: silent.append(end), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(HOUR_S):
                    await reader.read(1)
            for end in (writer, *silent):
                end.close()
                await end.wait_closed()

    run_jumping(main(), hands)

    assert hands.passed_s == pytest.approx(HOUR_S)


def test_time_stands_while_another_thread_works():
    hands, gate = ManualClock(), threading.Event()

    async def main():
        timer = asyncio.create_task(asyncio.sleep(1.0))
        working = asyncio.get_running_loop().run_in_executor(None, gate.wait)
        threading.Timer(0.05, gate.set).start()
        await working
        stood = hands.passed_s
        await timer
        return stood

    assert run_jumping(main(), hands) == 0.0
    assert hands.passed_s == pytest.approx(1.0)


def test_a_plan_of_the_test_wakes_the_loop_at_its_moment():
    hands = ManualClock()

    async def main():
        come = asyncio.Event()
        hands.after(7.0, come.set)
        async with asyncio.timeout(HOUR_S):
            await come.wait()
        return hands.passed_s

    assert run_jumping(main(), hands) == 7.0


def test_the_real_clock_is_back_afterwards():
    before = clock.monotonic()

    async def main():
        await asyncio.sleep(1e9)

    run_jumping(main())

    assert before <= clock.monotonic() < before + HOUR_S
