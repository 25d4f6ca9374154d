"""The SLURM adapter against a real slurmctld: Cluster, JobControl and the batch script."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import cloudpickle
import pytest

from hpctrain.cluster.scheduler.slurm.client import SlurmCluster
from hpctrain.cluster.scheduler.slurm.command import clean
from hpctrain.cluster.scheduler.slurm.control import SlurmControl
from hpctrain.cluster.scheduler.slurm.script import render_script, sbatch
from hpctrain.core.base.records import NODE_DOWN, EndReason, JobRequest
from hpctrain.core.settings.schema import Settings, SlurmSettings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience
from tests.support.ledger_runs import all_fields, write_event
from tests.support.slurm_boot import tail

pytestmark = pytest.mark.slurm
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ENDS_AT_TERM = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from hpctrain.cluster.scheduler.slurm.control import SlurmControl
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
SlurmControl(os.environ["SLURM_JOB_ID"], restarts=0).forbid_requeue()
"""
SLEEP = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --requeue\nsleep 300\n"


@pytest.fixture
def token():
    """A submission of this test alone: the cluster remembers those of the others for a while."""
    return f"run-{secrets.token_hex(4)}"


@pytest.fixture
def request_of(tmp_path, token):
    """Make a job request from a script's text."""

    def make(script=SLEEP):
        run = RunDir(tmp_path / "run")
        run.jobs.mkdir(parents=True)
        run.script(token).write_text(script)
        return JobRequest(run.root, token, run.script(token), script)

    return make


def restarted(times):
    return lambda record: record.get("Restarts") == str(times) and record["JobState"] == "RUNNING"


# -- the login node's side


def test_job_is_found_by_its_token_until_it_is_cancelled(slurm, request_of, token):
    cluster = SlurmCluster()

    job_id = cluster.submit(request_of())
    slurm.wait_job(job_id, "RUNNING")
    found = cluster.find_job(token)
    cluster.cancel(job_id)
    slurm.wait_job(job_id, "CANCELLED")
    after = cluster.job(job_id)

    assert (found.job_id, found.state, found.alive) == (job_id, "RUNNING", True)
    assert found.nodes == "n1"
    assert (after.state, after.alive) == ("CANCELLED", False)
    cluster.cancel(job_id)  # once more does no harm


def test_tokens_that_only_begin_alike_are_not_mixed_up(slurm, request_of, token):
    cluster = SlurmCluster()

    cluster.submit(request_of())

    assert cluster.find_job(token[:-1]) is None
    assert cluster.find_job("other") is None


def test_job_that_nobody_knows_is_forgotten(slurm):
    assert SlurmCluster().job("987654") is None


def test_a_job_is_ended_from_within_but_not_one_that_was_started_again_meanwhile(slurm):
    job_id = running(slurm, "--nodes=2")
    SlurmControl(job_id, restarts=0).requeue()
    slurm.wait_job(job_id, restarted(1))

    SlurmControl(job_id, restarts=0).end()
    assert slurm.job(job_id)["JobState"] == "RUNNING"
    SlurmControl(job_id, restarts=1).end()

    slurm.wait_job(job_id, "CANCELLED")


def test_every_start_of_a_requeued_job_is_known_with_its_times(slurm):
    job_id, begun = running(slurm, "--nodes=2"), time.time()
    SlurmControl(job_id).requeue()
    slurm.wait_job(job_id, restarted(1))

    def both():
        found = SlurmCluster().starts([job_id, "999999"])
        return found if [one.state for one in found[1:]] == ["RUNNING"] else None

    first, second = slurm.wait_for(both, "both starts in accounting")

    assert (first.job_id, first.index, second.index) == (job_id, 0, 1)
    assert abs(first.start - begun) < 10
    assert first.start <= first.end <= second.start
    assert second.end is None
    assert len(first.nodes.split(",")) == 2


def test_unknown_partition_is_refused_in_one_line_with_those_that_there_are(
    slurm, request_of, token
):
    script = SLEEP.replace("--nodes=1", "--nodes=1 --partition=gpu80")

    with pytest.raises(ClusterError, match=r"gpu80.*partitions here: grace, urgent, work") as error:
        SlurmCluster().submit(request_of(script))

    assert not isinstance(error.value, ClusterUnreachable)
    assert "\n" not in str(error.value)
    assert SlurmCluster().find_job(token) is None


def test_stopped_slurmctld_is_unreachable_in_time(slurm, request_of, token):
    cluster = SlurmCluster()
    cluster.submit_timeout_s = cluster.query_timeout_s = 2
    request = request_of()
    slurm.kill_slurmctld()

    for ask in (
        lambda: cluster.job("1"),
        lambda: cluster.find_job(token),
        lambda: cluster.cancel("1"),
        lambda: cluster.submit(request),
        lambda: SlurmControl("1", timeout_s=2).facts(),
    ):
        with pytest.raises(ClusterUnreachable, match="within 2 s"):
            ask()


def test_job_whose_submission_timed_out_after_all_is_found_by_its_token(
    slurm, request_of, tmp_path, monkeypatch, token
):
    real = next(p for p in os.environ["PATH"].split(":") if Path(p, "sbatch").exists())
    slow = tmp_path / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\n{real}/sbatch "$@"\nsleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    cluster = SlurmCluster()
    cluster.submit_timeout_s = 3

    with pytest.raises(ClusterUnreachable, match="no answer within 3 s"):
        cluster.submit(request_of())

    assert cluster.find_job(token).alive is True


def test_the_shells_variables_change_nothing_and_are_reported(slurm, request_of, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "urgent")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "7")
    monkeypatch.setenv("MY_OWN", "kept")
    request = request_of("#!/bin/bash\n#SBATCH --nodes=1\nenv > env.txt\n")
    monkeypatch.chdir(request.run_dir)

    job_id = SlurmCluster().submit(request)
    record = slurm.wait_job(job_id, "COMPLETED")

    seen = (request.run_dir / "env.txt").read_text().splitlines()
    assert record["Partition"] == "work"
    assert "MY_OWN=kept" in seen
    assert not [line for line in seen if line.startswith(("SBATCH_", "SLURM_NTASKS_PER_NODE"))]
    assert {"SBATCH_PARTITION", "SLURM_NTASKS_PER_NODE"} <= set(clean(os.environ).dropped)


# -- the job's own side


def running(slurm, *options):
    job_id = slurm.sbatch(*options, "--requeue", "--wrap", "exec sleep 300")
    slurm.wait_job(job_id, "RUNNING")
    return job_id


def test_facts_of_a_running_job(slurm):
    submitted = time.time()
    job_id = running(slurm, "--time=10")

    facts = SlurmControl(job_id).facts()

    assert (facts.state, facts.restarts, facts.reason) == ("RUNNING", 0, None)
    assert facts.preempt_time is None
    assert submitted - 1 <= facts.end_time - 600 <= time.time()


def test_facts_of_a_preemption_with_grace(slurm):
    job_id = running(slurm, "--partition=grace", "--nodelist=n1", "--exclusive")

    began = time.time()
    slurm.submit_urgent(["n1"])
    slurm.wait_job(job_id, lambda record: record.get("PreemptTime") != "None")
    facts = SlurmControl(job_id, restarts=0).facts()

    assert (facts.state, facts.restarts) == ("RUNNING", 0)
    assert began - 1 <= facts.preempt_time <= time.time() + 30
    assert facts.comes_back is (slurm.version >= (24, 5))


@pytest.mark.every_slurm
def test_a_job_that_ends_for_good_in_its_grace_time_does_not_come_back(slurm):
    """Since 24.05 SLURM would run it again, although it exits with 0."""
    job_id = slurm.sbatch(
        *("--partition=grace", "--nodelist=n1", "--requeue", "--output=ends.out"),
        "--wrap",
        f"srun {shlex.join([sys.executable, '-c', ENDS_AT_TERM])}",
    )
    slurm.wait_for(lambda: "ready" in tail(slurm.at.work / "ends.out"), "the job's task")

    urgent = slurm.submit_urgent(["n1"])
    ended = slurm.wait_job(job_id, ("COMPLETED", "PREEMPTED", "PENDING", "FAILED"))

    assert ended["JobState"] == ("PREEMPTED" if slurm.version >= (24, 5) else "COMPLETED")
    assert (ended["Restarts"], ended["ExitCode"]) == ("0", "0:0")
    slurm.cancel(urgent)


def test_requeue_counts_as_done_where_it_has_been_asked_for_already(slurm):
    job_id = running(slurm)

    SlurmControl(job_id).requeue()
    SlurmControl(job_id).requeue()
    SlurmControl(job_id, restarts=0).requeue()

    assert slurm.job(job_id)["Restarts"] == "1"


def test_requeue_by_what_is_left_of_an_old_start_does_not_hit_its_successor(slurm):
    job_id = running(slurm)
    SlurmControl(job_id).requeue()
    slurm.wait_job(job_id, restarted(1))

    SlurmControl(job_id, restarts=0).requeue()

    assert restarted(1)(slurm.job(job_id))
    assert SlurmControl(job_id).previous_end() is EndReason.REQUEUED


def test_job_that_may_not_be_requeued_is_refused(slurm):
    job_id = slurm.sbatch("--no-requeue", "--wrap", "exec sleep 300")
    slurm.wait_job(job_id, "RUNNING")

    with pytest.raises(ClusterError, match=r"SLURM refused: .*disabled"):
        SlurmControl(job_id).requeue()


def test_requeue_waits_for_slurmctld_to_come_back(slurm):
    job_id = running(slurm)
    slurm.kill_slurmctld()
    back = threading.Timer(2, slurm.start_slurmctld)

    back.start()
    SlurmControl(job_id, restarts=0, timeout_s=60).requeue()
    back.join()

    slurm.wait_job(job_id, lambda record: record.get("Restarts") == "1")


def test_dead_node_is_told_from_other_requeues(slurm):
    job_id = running(slurm, "--nodelist=n1,n2", "--exclusive")
    control = SlurmControl(job_id, restarts=0, nodes=["n1", "n2"])

    slurm.kill_node("n2")
    slurm.wait_job(job_id, lambda record: record["Restarts"] == "1")
    facts = control.facts()

    assert (facts.restarts, facts.reason) == (1, NODE_DOWN)
    slurm.wait_for(
        lambda: control.previous_end() is EndReason.NODE_FAILED, "sacct to tell of the node"
    )


def test_requeue_lives_through_the_storm(slurm, tmp_path):
    """A scontrol that is hit by SIGTERM and SIGUSR2 before it has asked still asks."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f"#!/bin/sh\necho asked >> {tmp_path}/asked\n"
        f'while [ ! -e {tmp_path}/go ]; do sleep 0.05; done\nPATH="$REAL" exec scontrol "$@"\n'
    )
    scontrol.chmod(0o755)
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import os\nfrom hpctrain.node.agent import signals\n"
        "from hpctrain.cluster.scheduler.slurm.control import *\n"
        "signals.install()\nSlurmControl(os.environ['SLURM_JOB_ID']).requeue()\n"
    )
    step = f"REAL=$PATH PATH={tmp_path}:$PATH exec {sys.executable} {agent}"
    job_id = slurm.sbatch("--requeue", "--wrap", f"srun bash -c '{step}'; sleep 300")
    slurm.wait_for((tmp_path / "asked").exists, "scontrol to be called")

    for name in ("TERM", "USR2", "TERM"):
        slurm.run("scancel", "--signal", name, job_id, check=True)
    slurm.wait_for(lambda: _hit(slurm, job_id), "the signals to arrive")
    (tmp_path / "go").touch()

    slurm.wait_job(job_id, lambda record: record["Restarts"] == "1")
    assert (tmp_path / "asked").read_text() == "asked\n"


def _hit(slurm, job_id):
    """Whether the agent has taken both signals: their handlers have run, so none is pending."""
    pids = [
        p
        for p in slurm.pids_of_job(job_id)
        if b"agent.py" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]
    pending = [
        line
        for pid in pids
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("ShdPnd")
    ]
    return pids and all(int(line.split()[1], 16) == 0 for line in pending)


# -- the script, with a stand-in for the agent


LOAD_STAND_IN = """
from hpctrain.node.agent import signals
signals.install()
import pathlib, pickle, sys
sys.exit(pickle.loads(pathlib.Path(__file__).with_suffix(".pkl").read_bytes())())
"""


class StandIn:
    """What srun starts on each node here: it says where it stands, then does as it is told."""

    def __init__(self, run_dir, script):
        self.run = RunDir(run_dir)
        self.script = script

    def __call__(self):
        from hpctrain.cluster.scheduler.slurm.command import job_context
        from hpctrain.ledger.run.fence import take_attempt
        from hpctrain.node.agent import signals

        context = job_context()
        told = self.script[min(context.restarts, len(self.script) - 1)]
        report = self.run.root / f"context-{context.restarts}-{context.node_rank}.json"
        report.write_text(json.dumps(asdict(context)))
        if told == "wait for signals":
            patience.until(lambda: len(signals.arrivals()) >= 2)
            noted = sorted(arrival.signum for arrival in signals.arrivals())
            (self.run.root / f"signals-{context.node_rank}.json").write_text(json.dumps(noted))
            return 0
        if told == "die" or context.node_rank != 0:
            return 9 if context.node_rank == 0 else 0
        attempt = take_attempt(self.run, job_id=context.job_id, restarts=context.restarts).number
        write_event(
            self.run,
            "attempt_started",
            attempt=attempt,
            job_id=context.job_id,
            restarts=context.restarts,
        )
        if told == "work":
            patience.until(signals.arrivals)
            return 9
        reason, following = told
        write_event(self.run, "attempt_ended", attempt=attempt, reason=reason, next=following)
        return 0


@pytest.fixture
def submit(tmp_path, token):
    """Submit a run whose agents are stand-ins, one instruction per start of the job."""

    def submit_run(*script, name="run", **slurm_settings):
        run = RunDir(tmp_path / name)
        run.jobs.mkdir(parents=True)
        spec = Spec(name, "0", 0.0, "slurm", "local", Entry("recipe"), python=sys.executable)
        spec.settings = Settings(slurm=SlurmSettings(**{"time": "10", **slurm_settings}))
        spec.dump(run.spec)
        stand_in = tmp_path / "stand_in.py"
        stand_in.write_text(LOAD_STAND_IN)
        stand_in.with_suffix(".pkl").write_bytes(cloudpickle.dumps(StandIn(run.root, script)))
        text = render_script(spec, run, token)
        assert text.count(" -m hpctrain.entry.slurm_task ") == 1
        text = text.replace(" -m hpctrain.entry.slurm_task ", f" {stand_in} ")
        run.script(token).write_text(text)
        return run, sbatch(run.script(token))

    return submit_run


def output(run):
    return "\n".join(f"{p.name}:\n{p.read_text()}" for p in sorted(run.jobs.glob("*.out")))


def test_every_agent_knows_its_place(slurm, submit, token):
    submitted = time.time()
    name = 'odd 100%j $(touch pwned) it\'s "me"'
    run, job_id = submit(
        ("completed", "stop"),
        name=name,
        nodes="2-3",
        cpus_per_rank=2,
        extra=["--comment=two words $(touch pwned)"],
        setup=["export SETUP='done it'"],
    )

    record = slurm.wait_job(job_id, ("COMPLETED", "FAILED"))

    assert record["JobState"] == "COMPLETED", output(run)
    assert record["Comment"].startswith("two words $(touch pwned)")
    contexts = [json.loads(p.read_text()) for p in sorted(run.root.glob("context-0-*.json"))]
    assert [c["node_rank"] for c in contexts] == [0, 1, 2]
    assert contexts[0]["nodes"] == ["n1", "n2", "n3"]
    assert {c["master_addr"] for c in contexts} == {"127.0.0.1"}
    assert len({c["port"] for c in contexts}) == 1
    assert {c["token"] for c in contexts} == {token}
    assert {c["kill_wait_s"] for c in contexts} == {8.0}
    assert all(submitted - 1 <= c["end_time"] - 600 <= time.time() for c in contexts)
    assert {p.name for p in run.jobs.glob("*.out")} == {
        f"{token}.out",
        *(f"{token}-{n}.out" for n in range(3)),
    }


def test_agents_that_die_are_requeued_by_the_batch_side(slurm, submit):
    run, job_id = submit("die", ("completed", "stop"), nodes="2")

    record = slurm.wait_job(job_id, ("COMPLETED", "FAILED"))

    ended = [(e.fact.reason, e.fact.next) for e in ledger.read(run) if e.kind == "attempt_ended"]
    assert record["JobState"] == "COMPLETED", output(run)
    assert ended == [("crashed", "requeue"), ("completed", "stop")]


def test_requeue_that_no_agent_could_do_is_done_by_the_batch_side(slurm, submit):
    run, job_id = submit(("timed_out", "ask_batch"), ("completed", "stop"), nodes="2")

    slurm.wait_job(job_id, lambda record: record["Restarts"] == "1")
    slurm.wait_for(
        lambda: [e for e in ledger.read(run) if e.kind == "requeued"], "the requeue's record"
    )

    (requeued,) = [e for e in ledger.read(run) if e.kind == "requeued"]
    assert all_fields(requeued)["by"] == "batch"


def test_cancelled_job_whose_agents_die_stays_cancelled(slurm, submit):
    run, job_id = submit("work", nodes="2")
    slurm.wait_for(lambda: ledger.read(run), "the attempt to start")

    slurm.cancel(job_id)
    record = slurm.wait_job(job_id, "CANCELLED")
    slurm.wait_for(
        lambda: [e for e in ledger.read(run) if e.kind == "attempt_ended"], "the batch side"
    )

    (ended,) = [all_fields(e) for e in ledger.read(run) if e.kind == "attempt_ended"]
    assert record["Restarts"] == "0"
    assert (ended["reason"], ended["next"]) == ("cancelled", "stop"), output(run)


def test_tasks_note_the_step_signals(slurm, submit):
    run, job_id = submit("wait for signals", nodes="2")
    slurm.wait_for(lambda: len(list(run.root.glob("context-*"))) == 2, "two agents")

    slurm.run("scancel", "--signal=USR2", job_id, check=True)
    slurm.run("scancel", "--signal=TERM", job_id, check=True)
    slurm.wait_for(lambda: len(list(run.root.glob("signals-*"))) == 2, "their notes")

    noted = [json.loads(p.read_text()) for p in run.root.glob("signals-*")]
    assert noted == [[12, 15], [12, 15]]


def test_lost_node_leaves_a_range_that_still_fits(slurm, submit):
    run, job_id = submit("work", nodes="2-4", cpus_per_rank=2)
    slurm.wait_for(lambda: ledger.read(run), "the attempt to start")

    slurm.kill_node("n4")
    record = slurm.wait_job(job_id, restarted(1))

    assert record["NodeList"] == "n[1-3]"
    slurm.wait_for((run.root / "context-1-2.json").exists, "the third agent")
