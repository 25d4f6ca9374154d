"""A run's ledger and its logs together: every cause of the ledger has its verdict."""

from __future__ import annotations

import json
import os

import pytest

from hpctrain.advise.doctor.faults import FAULTS, OF_CAUSE
from hpctrain.cli.main import main
from hpctrain.cluster.scheduler import local as client
from hpctrain.ledger.history.run_state import EndCause
from tests.support.ledger_runs import Story, local_job

TRACED = (
    'Traceback (most recent call last):\n  File "/home/u/train.py", line 24, in main\n    x()\n'
)
ENDS = {
    EndCause.COMPLETED: ("completed", {}, None),
    EndCause.PREEMPTED: ("preempted", {}, None),
    EndCause.WALLTIME: ("timed_out", {}, None),
    EndCause.CANCELLED: ("cancelled", {}, None),
    EndCause.STOPPED: ("stopped", {}, None),
    EndCause.NODE_FAIL: ("node_failed", {"detail": "n2 does not answer"}, None),
    EndCause.UNFIT_NODE: ("node_failed", {"detail": "preflight: n2: no GPU"}, None),
    EndCause.REQUEUED: ("requeued", {}, None),
    EndCause.FENCED: ("fenced", {}, None),
    EndCause.HANG: ("crashed", {}, ("hang", "rank 1 holds up the others at train.py:24")),
    EndCause.DESYNC: ("crashed", {}, ("desync", "rank 1 called a barrier, the others not")),
    EndCause.GPU_OOM: ("crashed", {}, ("exception", "OutOfMemoryError: CUDA out of memory.")),
    EndCause.GPU_ERROR: ("crashed", {}, ("exception", "RuntimeError: CUDA error: unknown error")),
    EndCause.HOST_OOM: ("crashed", {}, ("exception", "MemoryError")),
    EndCause.NCCL_ERROR: ("crashed", {}, ("exception", "DistBackendError: NCCL error in: x")),
    EndCause.DATA_WORKER: (
        "crashed",
        {},
        ("exception", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "),
    ),
    EndCause.NAN: ("crashed", {}, ("exception", "FloatingPointError: loss is nan at step 7")),
    EndCause.STORAGE_FULL: (
        "crashed",
        {},
        ("exception", "OSError: [Errno 28] No space left on device"),
    ),
    EndCause.STORAGE_ERROR: (
        "crashed",
        {},
        ("exception", "OSError: [Errno 116] Stale file handle: '/scratch/x'"),
    ),
    EndCause.USER_ERROR: ("user_error", {}, ("exception", "ValueError: no such token")),
    EndCause.CRASHED: ("crashed", {}, ("signal", "killed by SIGKILL")),
    EndCause.UNKNOWN: ("unknown", {}, None),
}


def story(tmp_path, reason, failure, **fields):
    tale = Story(tmp_path / "lm-3").submitted().started(1)
    tale.add("phase", 1, name="initialised", device="cpu")
    tale.restored(1).steps(1, 1, 8)
    if failure is not None:
        kind, summary = failure
        tale.add("failure", 1, rank=1, node="n2", kind_of=kind, summary=summary)
    return tale.ended(1, reason, "stop", **fields)


@pytest.fixture
def runs_on(tmp_path, monkeypatch):
    """Has the job of a story's run in a state."""
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    own = {"controller_pid": os.getpid(), "controller_started": client.process_start(os.getpid())}
    return lambda state: local_job(tmp_path / "local", "17", state=state, **own)


def told(tmp_path, capsys, *words):
    code = main(["doctor", "lm-3", "--runs", str(tmp_path), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("cause", ENDS)
def test_every_cause_of_the_ledger_has_its_verdict(cause, tmp_path, capsys):
    reason, fields, failure = ENDS[cause]
    story(tmp_path, reason, failure, **fields)

    code, document = told(tmp_path, capsys)

    assert document["kind"] == OF_CAUSE[cause]
    assert document["run"] == "lm-3"
    assert (code == 1) is (cause is EndCause.UNKNOWN)
    assert document["do"]


def test_all_causes_are_tried_but_one_that_needs_another_story():
    assert set(EndCause) - set(ENDS) == {EndCause.HUNG_END}
    assert set(OF_CAUSE) == set(EndCause)


def test_every_fault_has_a_code_of_its_own():
    codes = [knowledge.code for knowledge in FAULTS.values()]
    assert codes == [f"HT{number}" for number in range(801, 801 + len(codes))]


IDLE = "3 attempts in a row without one new committed step (budget.no_progress is 3)"


@pytest.mark.parametrize("reason", ["preempted", "timed_out", "requeued", "node_failed"])
def test_a_run_that_was_stopped_for_attempts_that_came_to_nothing_is_told_that(
    reason, tmp_path, capsys
):
    tale = story(tmp_path, reason, None)
    cause = json.loads(_status(tmp_path, capsys))["attempts"][0]["cause"]
    tale.add("run_stopped", 1, reason=reason, exit_code=93, detail=IDLE)

    code, document = told(tmp_path, capsys)

    assert (code, document["kind"], document["certainty"]) == (0, "no_progress", "certain")
    assert document["headline"].endswith(f"{IDLE}; the last of them: {cause}")
    assert "checkpoint.interval_s" in document["do"][0]
    again = json.loads(_status(tmp_path, capsys))["attempts"][0]["cause"]
    assert again == cause, "the attempt's own cause stays what it was"


def test_what_follows_from_the_logs_verdict_does_not_from_the_ledger_s(tmp_path, capsys):
    tale = story(tmp_path, "timed_out", None)
    tale.log(1, 0, f"{TRACED}ValueError: no\nRuntimeError: Connection reset by peer\n")

    ruled_out = {one["what"]: one["why"] for one in told(tmp_path, capsys)[1]["ruled_out"]}

    assert not any("follows" in why for why in ruled_out.values())
    assert "the network" not in ruled_out, ruled_out
    assert "memory" in " ".join(ruled_out)


def test_a_program_that_left_with_a_code_is_not_told_to_mend_a_line(tmp_path, capsys):
    story(tmp_path, "user_error", ("exit", "train.sh: exit code 3"))
    (do,) = told(tmp_path, capsys)[1]["do"]
    assert "`hpctrain logs" in do


def _status(tmp_path, capsys):
    assert main(["status", "lm-3", "--runs", str(tmp_path), "--json"]) == 0
    return capsys.readouterr().out


def test_a_program_s_own_error_comes_before_the_budget_that_stopped_the_run(tmp_path, capsys):
    tale = story(tmp_path, "crashed", ("exception", "OSError: [Errno 28] No space left on device"))
    tale.add("run_stopped", 1, reason="crashed", exit_code=93, detail=IDLE)

    assert told(tmp_path, capsys)[1]["kind"] == "storage_full"


def test_a_budget_of_preemptions_is_no_want_of_progress(tmp_path, capsys):
    tale = story(tmp_path, "preempted", None)
    why = "7 attempts ended by preempted, budget.preemptions is 6"
    tale.add("run_stopped", 1, reason="preempted", exit_code=93, detail=why)

    assert told(tmp_path, capsys)[1]["kind"] == "preempted"


def test_ranks_that_did_not_end_are_named(tmp_path, capsys):
    tale = Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    tale.add("ranks_awaited", 1, returned=3, left=[2], quiet_s=60, limit_s=60, ended=True)
    tale.ended(1, "completed", "stop")

    _, document = told(tmp_path, capsys)

    assert (document["kind"], document["certainty"]) == ("hung_end", "certain")
    assert "rank 2 had not ended" in document["headline"]


def test_the_logs_say_what_stands_behind_a_broken_connection(tmp_path, capsys):
    tale = story(
        tmp_path, "crashed", ("exception", "RuntimeError: [gloo/x.cc:5] Connection closed by peer")
    )
    tale.log(1, 0, "RuntimeError: [gloo/x.cc:5] Connection closed by peer\n")
    tale.log(1, 2, f"{TRACED}OSError: [Errno 28] No space left on device\n")

    _, document = told(tmp_path, capsys)

    assert (document["kind"], document["certainty"]) == ("storage_full", "certain")
    assert document["evidence"][0]["source"] == "attempts/0001/rank-00002.log"
    assert document["evidence"][0]["rank"] == 2


def test_a_killed_rank_is_named_where_the_others_lost_their_connections_to_it(tmp_path, capsys):
    tale = story(tmp_path, "crashed", ("signal", "killed by SIGKILL"))
    log = tale.run.rank_log(1, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    lost = "RuntimeError: [gloo/x.cc:5] Connection closed by peer [10.0.0.2]:4711"
    log.write_text(f"{TRACED}{lost}\n")

    code, document = told(tmp_path, capsys)

    assert (code, document["kind"], document["certainty"]) == (0, "killed", "possible")
    assert (document["evidence"][0]["rank"], document["evidence"][0]["node"]) == (1, "n2")


def test_a_killed_rank_has_one_verdict_whether_or_not_its_agent_has_said_so(tmp_path, capsys):
    tale = story(tmp_path, "crashed", ("signal", "killed by SIGKILL"))
    before = told(tmp_path, capsys)[1]
    tale.run.jobs.mkdir()
    said = "2026-11-24 12:44:40 n2 agent attempt 1 torch.distributed: failed (exitcode: -9)\n"
    (tale.run.jobs / "tok-1.out").write_text(said)

    document = told(tmp_path, capsys)[1]

    assert (before["kind"], document["kind"]) == ("killed", "killed")
    assert (document["certainty"], document["evidence"][0]["rank"]) == ("possible", 1)


def test_the_scheduler_s_word_beats_what_its_signals_made_the_ranks_say(tmp_path, capsys):
    tale = story(tmp_path, "timed_out", None)
    tale.log(1, 0, f"{TRACED}RuntimeError: the loop was left\n")

    _, document = told(tmp_path, capsys)

    assert (document["kind"], document["certainty"]) == ("walltime", "certain")


def test_a_hang_that_was_found_is_certain_and_names_the_rank(tmp_path, capsys):
    tale = Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    summary = "rank 3 holds up the others at train.py:20"
    tale.add("hang", 1, kind_of="behind", ranks=[3], summary=summary, stood_s=40.0, limit_s=30.0)

    _, document = told(tmp_path, capsys)

    assert (document["kind"], document["certainty"]) == ("hang", "certain")
    assert summary in document["headline"]
    assert document["evidence"][0]["rank"] == 3


def test_a_run_that_goes_on_is_told_so(tmp_path, capsys, runs_on):
    runs_on("RUNNING")
    tale = Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    tale.log(1, 0, "step 8 loss: 2.0\n")

    _, document = told(tmp_path, capsys)

    assert document["kind"] == "running"
    assert "attempt 1 runs at step 8; nothing is known to be wrong" in document["headline"]


def test_one_whose_job_is_gone_does_not_run(tmp_path, capsys):
    tale = Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    tale.log(1, 0, "step 8 loss: 2.0\n")

    _, document = told(tmp_path, capsys)

    assert document["kind"] == "unknown"
    words = "attempt 1 stopped at step 8 without a word, and does not run any more"
    assert document["headline"] == words


def test_one_whose_job_is_suspended_stands(tmp_path, capsys, runs_on):
    Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    runs_on("SUSPENDED")

    _, document = told(tmp_path, capsys)

    assert (document["kind"], document["certainty"]) == ("running", "certain")
    assert document["headline"] == "the scheduler has suspended the job; attempt 1 stands at step 8"


def test_a_cancelled_run_whose_processes_still_end_does_not_run(tmp_path, capsys):
    tale = Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    tale.add("cancel_requested", job_id="17", save=False)

    code, document = told(tmp_path, capsys)

    assert (code, document["kind"], document["certainty"]) == (0, "cancelled", "certain")
    assert document["headline"].startswith("the run was cancelled; the scheduler ends the proc")
    assert document["do"] == ["nothing; `hpctrain status RUN` says when they have ended"]


def test_one_that_was_asked_to_save_runs_until_it_has(tmp_path, capsys, runs_on):
    runs_on("RUNNING")
    tale = Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    tale.add("cancel_requested", job_id="17", save=True)

    assert told(tmp_path, capsys)[1]["kind"] == "running"


def test_another_attempt_is_named_by_its_number(tmp_path, capsys):
    tale = story(tmp_path, "preempted", None)
    tale.started(2).restored(2, 8).ended(2, "timed_out", "requeue")

    assert told(tmp_path, capsys, "--attempt", "1")[1]["kind"] == "preempted"
    assert told(tmp_path, capsys)[1]["kind"] == "walltime"
    assert main(["doctor", "lm-3", "--runs", str(tmp_path), "--attempt", "3"]) == 4
    assert "has no attempt 3; it has 1 to 2" in capsys.readouterr().err


def test_a_run_without_an_attempt_is_one_line(tmp_path, capsys):
    Story(tmp_path / "lm-3").submitted()

    assert main(["doctor", "lm-3", "--runs", str(tmp_path)]) == 4
    assert "has no attempt yet" in capsys.readouterr().err


def test_what_the_batch_side_says_of_other_attempts_is_not_this_one_s(tmp_path, capsys):
    tale = story(tmp_path, "crashed", ("exception", "OSError: [Errno 28] No space left on device"))
    tale.started(2, by="restart").ended(2, "crashed", "stop")
    tale.run.jobs.mkdir()
    said = "2026-11-24 12:44:4{} n1 agent attempt {} torch.distributed: failed (exitcode: {})\n"
    (tale.run.jobs / "tok-1.out").write_text(said.format(0, 1, -11) + said.format(9, 2, -9))

    _, document = told(tmp_path, capsys)

    assert (document["kind"], document["certainty"]) == ("host_oom", "possible")
    assert document["evidence"][0]["source"] == "jobs/tok-1.out"


def test_the_batch_side_of_a_job_is_left_out_for_all_but_its_last_attempt(tmp_path, capsys):
    tale = story(tmp_path, "crashed", ("signal", "killed by SIGKILL"))
    tale.started(2, by="restart").ended(2, "crashed", "stop")
    tale.run.jobs.mkdir()
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0.\n"
    (tale.run.jobs / "tok-1.out").write_text(killed)

    assert told(tmp_path, capsys, "--attempt", "1")[1]["kind"] == "killed"
    assert told(tmp_path, capsys, "--attempt", "2")[1]["kind"] == "host_oom"


REQUEUE = "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-27T09:00:00 DUE TO JOB REQUEUE"


@pytest.mark.parametrize(
    ("reason", "kind"), [("timed_out", "walltime"), ("preempted", "preempted")]
)
def test_hpctrain_s_own_requeue_is_none_from_outside_and_nothing_is_to_be_done(
    reason, kind, tmp_path, capsys
):
    tale = Story(tmp_path / "lm-3").submitted().started(1)
    tale.ended(1, reason, "requeue")
    tale.run.jobs.mkdir()
    limit = REQUEUE.replace("DUE TO JOB REQUEUE", "DUE TO TIME LIMIT") if kind == "walltime" else ""
    (tale.run.jobs / "tok-1.out").write_text(f"{limit} ***\n" + f"{REQUEUE} ***\n" * 8)

    _, document = told(tmp_path, capsys)

    assert document["kind"] == kind
    assert document["follow_ons"] == []
    assert document["do"][0] == "nothing: the job was requeued and the run continues"
    assert "see that it loads its newest checkpoint" in document["do"][1]
    assert "#SBATCH" not in str(document)


def test_where_nothing_follows_the_general_advice_stands(tmp_path, capsys):
    Story(tmp_path / "lm-3").submitted().started(1).ended(1, "preempted", "stop")
    assert told(tmp_path, capsys)[1]["do"] == list(FAULTS["preempted"].do)


def test_a_program_that_tells_its_steps_is_not_told_to_load_a_checkpoint(tmp_path, capsys):
    tale = Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    tale.ended(1, "timed_out", "requeue")
    assert len(told(tmp_path, capsys)[1]["do"]) == 1


def test_a_job_that_slurm_did_not_requeue_is_resumed(tmp_path, capsys):
    tale = Story(tmp_path / "lm-3").submitted().started(1)
    tale.ended(1, "preempted", "requeue").add("requeue_failed", 1, why="operation is disabled")

    _, document = told(tmp_path, capsys)

    assert document["headline"].endswith("could not be requeued: operation is disabled")
    assert document["do"] == ["`hpctrain resume RUN` continues in a new job"]


@pytest.mark.parametrize("cause", ENDS)
@pytest.mark.parametrize("width", ["60", "100"])
def test_every_verdict_fits_eight_lines_and_why_shows_the_rest(
    cause, width, *, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", width)
    reason, fields, failure = ENDS[cause]
    tale = story(tmp_path, reason, failure, **fields)
    tale.log(1, 1, (failure or ("", "fine"))[1] + "\n")
    words = ["doctor", "lm-3", "--runs", str(tmp_path)]

    main(words)
    short = capsys.readouterr().out.splitlines()
    main([*words, "--why"])
    full = capsys.readouterr().out.splitlines()

    assert len(short) <= 8
    assert short[0] == full[0]
    assert any(line.startswith("Do ") for line in short)
    assert short[-1].strip().startswith("--why")
    assert max(map(len, short)) <= int(width) or max(map(len, full)) > int(width)
    assert ("Not the cause" in "".join(full)) >= ("Not the cause" in "".join(short)) == 0
