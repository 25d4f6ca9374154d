"""A training run that is cut into jobs and waits in a simulated queue until it is done."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tests.support.queue_sim.controller import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.queue_sim.controller import Controller

HOUR_S = 3600
REQUEUE_S = 121
"""SLURM's default wait before a requeued job may start."""


class Shape(NamedTuple):
    """Nodes and time limit of one job."""

    nodes: int
    limit_s: float


@dataclass(frozen=True)
class Training:
    """What a run needs.

    Attributes:
        node_hours: Of steps, on one node.
        overhead: What each further node takes of every node's speed: 0.02 makes 16 nodes 1.3 times
            as costly as one.
        restart_s: From a job's start to its first step, and its last save.
        lost_s: Work that is lost when a node dies.
        noise: How much faster or slower one job is than another, as a standard deviation.
        seed: Of that noise.
    """

    node_hours: float
    overhead: float = 0.02
    restart_s: float = 180
    lost_s: float = 900
    noise: float = 0.0
    seed: int = 0

    def speed(self, nodes: int) -> float:
        """Node-hours of steps that so many nodes do in an hour."""
        return nodes / (1 + self.overhead * (nodes - 1))


@dataclass(frozen=True)
class Part:
    """One job of a run: its shape, and what came of it.

    Attributes:
        step_s: What it took for a node-hour of steps.
    """

    shape: Shape
    queued_s: float
    started_s: float
    ended_s: float
    step_s: float

    @property
    def wait_s(self) -> float:
        """From its submission, or from the end of the time that SLURM holds a requeued job back."""
        return self.started_s - self.queued_s


@dataclass
class Situation:
    """What is known when the next job's shape is chosen."""

    controller: Controller
    training: Training
    remaining_node_hours: float
    began_s: float
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What a run took."""

    result_s: float
    node_hours: float
    parts: tuple[Part, ...]


def train(
    controller: Controller,
    training: Training,
    choose: Callable[[Situation], Shape],
    *,
    partition: str = "work",
    user: str = "me",
) -> Outcome:
    """Submit jobs of the shapes that `choose` names, one after another, until the run is done.

    Raises:
        ValueError: The partition does not allow a shape.
        RuntimeError: A job never starts, or a shape leaves no time for a step.
    """
    rng = random.Random(training.seed)
    situation = Situation(controller, training, training.node_hours, controller.now_s)
    while situation.remaining_node_hours > 1e-9:
        shape = choose(situation)
        if shape.limit_s <= training.restart_s:
            raise RuntimeError(f"{shape}: no time for a step beside {training.restart_s} s")
        if situation.parts:
            controller.run(controller.now_s + REQUEUE_S)
        speed = training.speed(shape.nodes) * math.exp(rng.gauss(0, training.noise))
        needs_s = training.restart_s + situation.remaining_node_hours / speed * HOUR_S
        queued_s = controller.now_s
        job = controller.submit(
            Request(
                queued_s, shape.nodes, shape.limit_s, min(needs_s, shape.limit_s), user, partition,
                name="training", requeue=False,
            )
        )  # fmt: skip
        controller.run_until_ended(job)
        started_s, ended_s = job.starts[-1], controller.now_s
        lost_s = 0.0 if job.ended == "COMPLETED" else training.lost_s
        useful_s = max(0.0, ended_s - started_s - training.restart_s - lost_s)
        situation.remaining_node_hours -= useful_s / HOUR_S * speed
        situation.parts.append(Part(shape, queued_s, started_s, ended_s, HOUR_S / speed))
    parts = tuple(situation.parts)
    spent = sum(part.shape.nodes * (part.ended_s - part.started_s) for part in parts)
    return Outcome(controller.now_s - situation.began_s, spent / HOUR_S, parts)
