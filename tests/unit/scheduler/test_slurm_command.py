"""One command at a time: bounded, deaf to SLURM's signals, with errors a user understands."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.command import CommandMissing, clean, run, run_until
from hpctrain.cluster.scheduler.slurm.executor import HpctrainExecutor
from hpctrain.errors import ClusterError, ClusterUnreachable
from tests.support import patience


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2", "HUP"])
def test_child_lives_through_the_step_signals(name):
    assert run(["sh", "-c", f"kill -{name} $$; echo alive"]) == "alive\n"


def test_grandchild_lives_through_the_step_signals():
    assert run(["sh", "-c", "sh -c 'kill -TERM $$; echo alive'; :"]) == "alive\n"


def test_signal_that_comes_meanwhile_reaches_us_afterwards():
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))

    try:
        run(["sh", "-c", f"kill -USR2 {os.getpid()}"])
    finally:
        signal.signal(signal.SIGUSR2, before)

    assert seen == [1]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_child_is_out_of_reach_of_ctrl_c():
    assert int(run(["sh", "-c", "ps -o sid= -p $$"])) != os.getsid(0)


def test_missing_command_says_where_to_go():
    with pytest.raises(CommandMissing, match="no-such-sbatch is not on PATH here"):
        run(["no-such-sbatch"])


def test_silent_command_ends_with_its_children_at_its_time_out(tmp_path):
    mark = tmp_path / "pid"

    with pytest.raises(ClusterUnreachable, match=r"sh gave no answer within 0\.5 s:"):
        run(["sh", "-c", f"sleep 100000 & echo $! > {mark}; wait"], timeout_s=0.499999)

    child = Path(f"/proc/{mark.read_text().strip()}")
    patience.until(lambda: not child.exists(), "the end of the child")  # soon after SIGKILL


def test_refusal_is_the_first_error_line():
    said = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed"
    )

    with pytest.raises(
        ClusterError, match=r"^SLURM refused: .*partition specified: x .*exit 3"
    ) as e:
        run(["sh", "-c", f"echo '{said}' >&2; exit 3"])

    assert not isinstance(e.value, ClusterUnreachable)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Batch job submission failed: Protocol authentication error",
        "slurm_load_jobs error: Invalid authentication credential",
    ],
)
def test_silent_slurmctld_is_unreachable_not_a_refusal(said):
    with pytest.raises(ClusterUnreachable, match="slurmctld does not answer"):
        run(["sh", "-c", f"echo '{said}' >&2; exit 1"])


NO_CLUSTER = """\
sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""


@pytest.fixture
def sbatch_without_cluster(tmp_path, monkeypatch):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{NO_CLUSTER}END\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)


def test_a_command_that_finds_no_cluster_says_so(sbatch_without_cluster):
    with pytest.raises(ClusterUnreachable, match="sbatch finds no SLURM cluster from this machine"):
        run(["sbatch"])


def test_a_job_that_was_sent_to_no_cluster_is_refused(sbatch_without_cluster, tmp_path):
    """Nobody can have accepted it, so no later command has to look for it."""
    script = tmp_path / "run-1.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ClusterError) as error:
        HpctrainExecutor(tmp_path, script, 5.0).submit(print)
    assert not isinstance(error.value, ClusterUnreachable)
    assert "--cluster local" in str(error.value)


def test_silence_is_tried_again_until_it_ends(tmp_path):
    tries = tmp_path / "tries"
    script = (
        f"echo >> {tries}; [ $(wc -l < {tries}) -ge 3 ] && echo ok && exit 0; "
        "echo 'Unable to contact slurm controller' >&2; exit 1"
    )

    assert run_until(["sh", "-c", script], deadline=time.monotonic() + 30) == "ok\n"


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Invalid job id specified",
        "slurm_requeue error: Access/permission denied",
        "Job/step already completing or completed for job 7",
        "Job is pending execution for job 7",
        "Requested operation is presently disabled for job 7",
    ],
)
def test_refusal_is_not_tried_again(tmp_path, said):
    tries = tmp_path / "tries"

    with pytest.raises(ClusterError, match="SLURM refused"):
        run_until(["sh", "-c", f"echo >> {tries}; echo '{said}' >&2; exit 1"], deadline=1e18)

    assert tries.read_text().count("\n") == 1


def test_an_error_that_nobody_has_foreseen_is_no_refusal_to_a_job(tmp_path):
    """Asked once more it may be gone, and a run of weeks hangs on the answer."""
    tries = tmp_path / "tries"
    script = (
        f"echo >> {tries}; [ $(wc -l < {tries}) -ge 2 ] && echo ok && exit 0; "
        "echo 'slurm_requeue error: Plugin of a kind unheard of' >&2; exit 1"
    )

    assert run_until(["sh", "-c", script], deadline=time.monotonic() + 30) == "ok\n"


def test_an_error_that_stays_is_told_at_the_deadline(tmp_path):
    with pytest.raises(ClusterError, match="kind unheard of"):
        run_until(
            ["sh", "-c", "echo 'of a kind unheard of' >&2; exit 1"], deadline=time.monotonic() + 1
        )


def test_no_room_for_another_process_is_no_answer(monkeypatch):
    def full(*_args, **_more):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)

    with pytest.raises(ClusterUnreachable, match="sh cannot be started now"):
        run(["sh", "-c", ":"])

    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


@pytest.mark.slurm
def test_the_real_scontrol_without_its_munged_is_no_answer(tmp_path, monkeypatch):
    """slurmctld is there, munged is not: each command says so in words of its own."""
    with socket.create_server(("127.0.0.1", 0)) as slurmctld:
        conf = tmp_path / "slurm.conf"
        conf.write_text(
            "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nAuthType=auth/munge\n"
            f"SlurmctldPort={slurmctld.getsockname()[1]}\n"
            f"AuthInfo=socket={tmp_path}/munge.socket,ttl=5\nNodeName=n1\n"
        )
        monkeypatch.setenv("SLURM_CONF", str(conf))

        for words in (["show", "job", "7"], ["requeue", "7"]):
            with pytest.raises(ClusterUnreachable, match="Munge encode failed"):
                run(["scontrol", *words])


def test_silence_ends_at_the_deadline():
    with pytest.raises(ClusterUnreachable):
        run_until(["sleep", "100000"], deadline=time.monotonic() + 1)


def test_what_the_shell_leaks_is_dropped_and_named():
    environ = {
        "PATH": "/bin",
        "SBATCH_PARTITION": "x",
        "SLURM_JOB_ID": "7",
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_STATES": "PENDING",
        "SLURM_CLUSTERS": "other",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JWT": "secret",
        "HPCTRAIN_PORT": "20000",
        "HPCTRAIN_SITE_PATH": "/sites",
    }

    cleaned = clean(environ)

    assert cleaned.dropped == [
        "HPCTRAIN_PORT",
        "SBATCH_PARTITION",
        "SLURM_CLUSTERS",
        "SLURM_JOB_ID",
        "SLURM_TIME_FORMAT",
        "SQUEUE_STATES",
    ]
    assert set(cleaned.env) == set(environ) - set(cleaned.dropped)


def test_commands_run_without_what_leaks(monkeypatch):
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")

    assert run(["sh", "-c", 'echo "$SQUEUE_STATES,$SLURM_TIME_FORMAT"']) == ",%s\n"
    assert run(["sh", "-c", 'echo "$SLURM_TIME_FORMAT"'], query=False) == "\n"


def test_who_lacks_a_command_inside_of_a_job_is_not_sent_to_a_login_node(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(
        CommandMissing, match=r"on a node of job 77, .*\(slurm\.setup, modules"
    ) as it:
        run(["no-such-sbatch"])
    assert "--cluster local" not in str(it.value)
