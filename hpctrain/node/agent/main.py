"""The life of an agent, from its first signal handler to the decision on what follows.

tests/unit/agent/test_ending.py holds the promises of a start, tests/engines/test_node_agent.py
those of the rounds.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock, process
from hpctrain.core.base.env import (
    HPCTRAIN_BATCH_STARTED,
    HPCTRAIN_NODE,
    HPCTRAIN_RELAY,
    HPCTRAIN_REPLICA_SERVER,
)
from hpctrain.core.base.files import follow_folder
from hpctrain.core.base.log import hear_elastic
from hpctrain.core.base.secret import code
from hpctrain.errors import ClusterError, RunAlive
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run import fence
from hpctrain.ledger.run.event_types import AttemptStarted, JobSuspended, OrphanLeft
from hpctrain.ledger.run.fence import read_fence
from hpctrain.ledger.run.ownership import job_spec, start_secret
from hpctrain.node.agent import signals
from hpctrain.node.agent.control import NodeControl
from hpctrain.node.agent.cpus import cpus_of_ranks
from hpctrain.node.agent.environment import RankEnvironment
from hpctrain.node.agent.liveness import EARLY_END_S, liveness_of
from hpctrain.node.agent.loss_ending import (
    LeaderFailover,
    LossEnding,
    NoLeader,
    Succeeds,
    generation_of,
    take_over,
)
from hpctrain.node.agent.preload import NodeCheck, preload
from hpctrain.node.agent.rounds import NothingToResume, RoundHooks, RoundPart
from hpctrain.node.control import heartbeat
from hpctrain.node.hangs import stacks
from hpctrain.node.hangs.standing import FEWEST_S, HangLimits
from hpctrain.node.memory import replica_peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.cluster.scheduler.base import JobControl
    from hpctrain.core.base.records import JobContext
    from hpctrain.core.settings.schema import AliveSettings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.liveness import LivenessChannel
    from hpctrain.node.agent.loss_ending import Generation
    from hpctrain.node.agent.node import InPlaceAgent
    from hpctrain.node.agent.rendezvous import LeftOut, Loss, Rendezvous
    from hpctrain.node.agent.resume import ResumeArgs

log = logging.getLogger("hpctrain.agent")


def run_agent(run: RunDir, context: JobContext, control: JobControl) -> int:
    """Run one node's agent until the job's part of the run is over.

    Called once on every node of the allocation. Returns the exit code of the task: 0 on every node
    but the first, whose code tells how the run stands (`errors.EXIT_CODES`).
    """
    signals.install()
    os.environ[HPCTRAIN_NODE] = context.nodes[context.node_rank]  # what is logged names it
    follow_folder(run.root)  # the ranks are forked from here
    replica_server = os.environ.pop(HPCTRAIN_REPLICA_SERVER, "")
    environ, generation = dict(os.environ), generation_of(os.environ)
    if generation is not None:
        context = generation.context(context)
    try:
        return _run_generation(
            run, context, control, generation=generation, replica_server=replica_server
        )
    except Succeeds as succeeds:
        take_over(succeeds.generation, run, environ, succeeds.replica_server)


def _run_generation(
    run: RunDir,
    context: JobContext,
    control: JobControl,
    *,
    generation: Generation | None,
    replica_server: str,
) -> int:
    """See `run_agent`; raises `Succeeds` where this process is to be one of the next generation."""
    spec = job_spec(run)
    shared = start_secret(run, context.job_id, context.restarts)
    ending = LossEnding(run, spec, context, control)
    started = clock.now()
    if context.node_rank == 0 and (why := _why_not(run, context, ending)):
        # Not 0: the other nodes' agents would wait for this one for minutes; so they are killed.
        _send_home(liveness_of(spec, context, shared), why)
        return RunAlive.exit_code
    # From the liveness process on, the others may take this node for lost, and see to the job.
    follows = _newest_attempt(run) if generation is None else generation.follows
    environment = _environment(run, spec, context)
    secret = shared if generation is None else generation.secret(shared)
    liveness = liveness_of(spec, context, secret)
    node_check = NodeCheck(run, spec, context, secret)
    if generation is None:  # others were looked at before
        node_check.begin()
    # Before anything large is imported.
    node_control = _node_control(spec.settings.alive, context, secret, liveness, replica_server)
    ending.seen_step = lambda: heartbeat.highest_step(node_control.folder)
    ending.failover = _failover(run, shared, context, liveness)

    def rounds() -> int:
        _preload(spec)
        if against := node_check.against():
            return node_check.leave(against, ending)
        return _run_rounds(
            run,
            spec,
            context,
            ending,
            environment,
            secret=secret,
            started=started,
            node_control=node_control,
            liveness=liveness,
            generation=generation,
            follows=follows,
        )

    leads = generation is not None and context.node_rank == 0
    return _see_through(rounds, ending, node_control, liveness, leads_others=leads)


def _failover(
    run: RunDir, secret: str, context: JobContext, liveness: LivenessChannel | None
) -> NoLeader:
    """How the agents that are left continue without the first node."""
    is_in_container = bool(os.environ.get(HPCTRAIN_RELAY))  # whose relay is the first node's
    if liveness is None or is_in_container:
        return NoLeader()
    return LeaderFailover(run, secret, context)


def _see_through(
    rounds: Callable[[], int],
    ending: LossEnding,
    node_control: NodeControl,
    liveness: LivenessChannel | None,
    *,
    leads_others: bool,
) -> int:
    """Run the rounds and leave no process behind, but copies to those that continue.

    `leads_others`: this node stands in for a first node that was lost with the batch script.
    """
    try:
        return rounds()
    except Succeeds as succeeds:
        succeeds.replica_server = node_control.hand_over()
        raise
    except ClusterError as error:
        if not leads_others:
            raise
        return ending.end_without_nodes(str(error))
    finally:
        node_control.stop()
        _send_home(liveness, "the agent of the first node has left")
        if leads_others:
            ending.end_job()
        # Python gives handled signals back their default action as it exits, and the requeue's
        # SIGTERM storm is under way: without this the agent would count as killed.
        signals.ignore_all()


def _node_control(
    alive: AliveSettings,
    context: JobContext,
    secret: str,
    liveness: LivenessChannel | None,
    replica_server: str,
) -> NodeControl:
    return NodeControl(
        context.master_addr,
        secret,
        keeps_copies=alive.memory != "no",
        # Where a lost node ends the job, its part in another one's memory would be lost with it.
        copies_to_peer=alive.memory_peer == "auto" and liveness is not None,
        replica_server=replica_server,
    )


def _why_not(run: RunDir, context: JobContext, ending: LossEnding) -> str:
    """Node 0: why this job must not run, or ""."""
    why, fence = ending.is_over(), read_fence(run)
    # A job that may not start is late: the newest attempt may be a newer job's, and live.
    if not why or (fence is not None and fence.job_id == context.job_id):
        ending.record_lost_attempt()
    if why:
        ledger.record(run, OrphanLeft(job_id=context.job_id, why=why))
        log.warning("%s", why)
    return why


def _send_home(liveness: LivenessChannel | None, why: str) -> None:
    """Node 0: tell agents that wait for a round that there will be none."""
    if liveness is not None:
        if liveness.place.node == 0:
            liveness.end(why, EARLY_END_S)
        liveness.stop()


def _environment(run: RunDir, spec: Spec, context: JobContext) -> RankEnvironment:
    _allow_connections(spec, context)  # before the store's process and the ranks are forked
    environment = RankEnvironment(run, spec, context)
    environment.before_imports()
    return environment


def _allow_connections(spec: Spec, context: JobContext) -> None:
    """Each rank has connections to all others; the usual soft limit ends near 250 ranks."""
    world_size = len(context.nodes) * spec.settings.slurm.ranks()
    node = context.nodes[context.node_rank]
    warning = process.warning(world_size, process.raise_limit(), node)
    if warning:
        log.warning("%s", warning)


def _preload(spec: Spec) -> None:
    preload(spec)
    signals.start_resource_tracker()


def _run_rounds(  # noqa: C901 - what the hooks do, a function each
    run: RunDir,
    spec: Spec,
    context: JobContext,
    ending: LossEnding,
    environment: RankEnvironment,
    *,
    secret: str,
    started: float,
    node_control: NodeControl,
    liveness: LivenessChannel | None,
    generation: Generation | None,
    follows: int,
) -> int:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from hpctrain.checkpoint.sealed.start import resume_at_start
    from hpctrain.node.agent.in_place import rendezvous_of
    from hpctrain.node.agent.node import InPlaceAgent, NodeAgent
    from hpctrain.node.agent.ranks import run_rank
    from hpctrain.node.agent.rendezvous import RENDEZVOUS_S, Rendezvous
    from hpctrain.node.agent.sealing import SealWatch
    from hpctrain.node.agent.stop_deadline import StopDeadline
    from hpctrain.node.agent.stop_notice import StopNotice

    imported = clock.now()
    cpus = cpus_of_ranks(spec, os.environ, shared=context.on_this_machine)
    hear_elastic()
    deadline = StopDeadline(
        context,
        arrivals=signals.arrivals,
        ask=ending.ask,
        stop_margin_s=spec.settings.run.stop_margin_s,
        on_suspended=lambda seconds: ending.record(
            agent.attempt_number, JobSuspended(seconds=round(seconds, 1))
        ),
    )

    # Meanwhile the nodes' memory keeps its copies; in another job only the disk's would be left.
    patiently = partial(deadline.patiently, patience_s=spec.settings.checkpoint.patience_s)

    def begin(world_size: int) -> Attempt:
        again = agent.end is not None or generation is not None
        before = agent.attempt_number if agent.end is not None else follows
        deadline.wait(ending.pause_s)
        attempt = _take_attempt(run, context, before, ending, patiently)
        batch_started = None if again else os.environ.get(HPCTRAIN_BATCH_STARTED)
        begun = AttemptStarted(
            **fence.identity(run, attempt),
            **_peer_fields(rendezvous, node_control),
            by="restart" if again else "start",
            nodes=rendezvous.names(),
            spares=rendezvous.spares,
            world_size=world_size,
            ranks_per_node=spec.settings.slurm.ranks(),
            slurm_cluster=context.cluster,
            cpus=tuple(cpus),
            job_started=context.start_time,
            batch_started=float(batch_started) if batch_started else None,
            agent_started=None if again else started,
            imported=None if again else imported,
        )
        patiently(partial(ledger.append, run, begun, attempt=attempt.number))
        return attempt

    def resume(attempt: Attempt, on_bytes: Callable[[int], None]) -> str | None:
        settings, cwd = spec.settings.checkpoint, spec.entry.cwd
        return resume_at_start(run, attempt, settings, cwd=cwd, on_bytes=on_bytes)

    def sealing(attempt: Attempt) -> RoundPart:
        if not spec.settings.checkpoint.sealed:
            return RoundPart()
        return SealWatch(
            run,
            attempt,
            spec.settings.checkpoint,
            spec.entry.cwd,
            is_stopping=deadline.is_stop_requested,
        )

    def lost(loss: Loss, members: tuple[int, ...] | None) -> None:
        names = [context.nodes[node] for node in members or ()]
        ending.record_loss(agent.attempt_number or None, loss, names)

    # The last part is nobody's to guess; what agents say is signed besides.
    run_id = f"{context.job_id}.{context.restarts}.{code(secret, 'rendezvous')[:16]}"
    at = (context.master_addr, context.port, context.node_rank, context.nodes)
    rendezvous = (
        Rendezvous(*at, run_id=run_id, timeout_s=RENDEZVOUS_S)
        if liveness is None
        else rendezvous_of(liveness, spec, context, run_id=run_id, generation=generation)
    )
    workers = WorkerSpec(
        role="rank",
        local_world_size=spec.settings.slurm.ranks(),
        entrypoint=run_rank,
        args=(_task(spec, cpus),),
        rdzv_handler=rendezvous,
        max_restarts=1_000_000,
        monitor_interval=0.1,
        master_addr=context.master_addr,
        master_port=context.port if liveness is None else None,
    )

    hooks = None
    if context.node_rank == 0:
        hooks = RoundHooks(
            begin,
            deadline,
            lambda failure: ending.after_crash(agent.attempt_number, failure),
            StopNotice(run, context, deadline, lead_s=_lead_s(spec)).look,
            resume=resume,
            sealing=sealing,
            may_go_on=lambda why: ending.after_loss(agent.attempt_number, why),
            lost=lost,
            starts=ending.starts,
            more_args=partial(_more_args, spec),
            record=lambda fact: ending.record(agent.attempt_number, fact),
            asked_stacks=partial(stacks.asked, run.stacks_request, context.job_id),
        )
    agent = (NodeAgent if liveness is None else InPlaceAgent)(
        workers,
        node=context.nodes[context.node_rank],
        attempt_dir=run.attempt,
        hooks=hooks,
        start_method=spec.settings.run.start_method,
        before_ranks=environment.for_attempt,
        secret=secret,
        end_wait_s=spec.settings.run.end_wait_s,
        control=node_control,
        hang_limits=_hang_limits(spec),
    )
    if isinstance(agent, InPlaceAgent):
        _prepare_to_stay(agent, run, spec.settings.alive, context, ending)
    try:
        agent.run()
        if isinstance(agent, InPlaceAgent) and agent.left_out is not None:
            return _leave(agent, agent.left_out, rendezvous, ending, liveness)
        if hooks is None or agent.end is None:
            # Not 0 where node 0's agent is silent: the scheduler ends it; the batch side decides.
            return int(agent.end is not None and bool(agent.end.left_out))
        return ending.conclude(agent.attempt_number, agent.end, deadline)
    except NothingToResume as error:
        if hooks is None:
            return 0
        return ending.end_without_resume(agent.attempt_number, error.why)
    finally:
        rendezvous.close()


def _take_attempt(
    run: RunDir,
    context: JobContext,
    follows: int,
    ending: LossEnding,
    patiently: Callable[[Callable[[], Any]], Any],
) -> Attempt:
    """Begin the next attempt, on a disk that may be full for a while."""
    take = partial(
        fence.take_attempt,
        run,
        job_id=context.job_id,
        restarts=context.restarts,
        follows=follows,
        check=ending.check_leads,
    )
    attempt: Attempt = patiently(take)
    # Before the other nodes look for them, or find no room for them.
    patiently(partial(run.output.mkdir, exist_ok=True))
    patiently(partial(run.attempt(attempt.number).mkdir, parents=True, exist_ok=True))
    patiently(ending.write_missed)
    return attempt


def _newest_attempt(run: RunDir) -> int:
    """Return its number, 0 for none."""
    newest = read_fence(run)
    return 0 if newest is None else newest.number


def _peer_fields(rendezvous: Rendezvous, node_control: NodeControl) -> dict[str, Any]:
    """Return `attempt_started`'s fields of replica peers; warn if a switch has both of a pair."""
    names, switches = rendezvous.names(), rendezvous.switches()
    if not node_control.copies_to_peer or len(names) == 1:
        return {}
    peers = replica_peer.replica_peers_of(switches)
    if why := replica_peer.warning(names, peers, switches):
        log.warning("%s", why)
    by_name = {"peers": tuple(names[peer] for peer in peers)}
    return by_name | ({"switches": switches} if any(switches) else {})


def _prepare_to_stay(
    agent: InPlaceAgent,
    run: RunDir,
    alive: AliveSettings,
    context: JobContext,
    ending: LossEnding,
) -> None:
    """Give an agent what it needs in the place of lost nodes."""
    agent.run_of_copies = run if alive.memory != "no" else None
    agent.has_successor = ending.failover.is_possible
    if context.node_rank == 0:
        ending.excluded_nodes.leave_out = agent.leave_out


def _leave(
    agent: InPlaceAgent,
    left_out: LeftOut,
    rendezvous: Rendezvous,
    ending: LossEnding,
    liveness: LivenessChannel | None,
) -> int:
    """A node that takes part no more; where node 0 died one of them sees to the job.

    Raises:
        Succeeds: this one continues, with those that are left.
    """
    if liveness is not None:
        liveness.stop()  # its ranks have ended; it would kill who takes seconds for the job
    log.warning("leaves the job: %s", left_out)
    if not left_out.first_is_gone:
        return 0
    line = [node for node in rendezvous.members if node]
    line += [node for node in range(1, len(rendezvous.nodes)) if node not in line]
    own = rendezvous.nodes[rendezvous.node]
    attempt = agent.attempt_number
    turn = line.index(rendezvous.node)
    if not rendezvous.can_do_without_first():
        ending.failover = NoLeader()
    following = ending.after_first_node(str(left_out), own, attempt, turn)
    if following is not None:
        raise Succeeds(following)
    return 0


def _more_args(spec: Spec, start: int, resume_from: str | None) -> ResumeArgs:
    """What the program gets beside its own arguments at this start."""
    from hpctrain.node.agent.resume import resume_args

    settings, cwd = spec.settings, spec.entry.cwd
    sealed = settings.checkpoint.sealed
    return resume_args(settings.run, start=start, resume=resume_from, cwd=cwd, sealed=sealed)


def _lead_s(spec: Spec) -> float:
    """So long before its end a job tells a program of which nobody knows what its save takes."""
    return max(spec.settings.run.stop_margin_s, spec.settings.slurm.signal_lead_s)


def _hang_limits(spec: Spec) -> HangLimits:
    alive, save_s = spec.settings.alive, spec.settings.checkpoint.timeout_s
    return HangLimits(
        alive.hang_s or FEWEST_S,
        alive.first_step_s,
        save_s,
        ends_round=alive.hang == "restart",
        watches=alive.hang != "off",
        desync=alive.desync,
        stragglers=alive.stragglers,
    )


def _task(spec: Spec, cpus: list[str]) -> object:
    from hpctrain.core.base.records import RankTask

    entry = spec.entry
    return RankTask(
        module="hpctrain.recipes.lm.train" if entry.kind == "recipe" else "",
        script=entry.path if entry.kind == "script" else "",
        as_module=entry.module,
        program=entry.path if entry.kind == "program" else "",
        local_rank=entry.local_rank,
        args=list(entry.args),
        cwd=entry.cwd,
        python_path=list(entry.python_path),
        cpus=cpus,
    )
