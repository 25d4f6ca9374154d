"""`hpctrain local`: a rehearsal says what it cannot do, instead of doing something else."""

from __future__ import annotations

from hpctrain.cli.main import main
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import local_job, write_event


def _run_with_job(tmp_path, monkeypatch, **fields):
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    run = RunDir(tmp_path / "runs" / "lm")
    run.root.mkdir(parents=True)
    run.spec.write_text("{}")
    write_event(run, "submit_intent", token="tok-1")
    write_event(run, "submitted", token="tok-1", job_id="local-1", cluster="local", nodes="2-4")
    local_job(tmp_path / "local", "local-1", state="RUNNING", **fields)
    return ["--runs", str(tmp_path / "runs")]


def test_a_preemption_that_leaves_too_few_nodes_is_refused(tmp_path, monkeypatch, capsys):
    where = _run_with_job(tmp_path, monkeypatch, min_nodes=2)

    code = main(["local", "preempt", "lm", "--leave", "1", *where])

    assert code == 2
    assert "needs at least 2 nodes" in capsys.readouterr().err
    assert not list((tmp_path / "local" / "local-1").glob("request-*"))


def test_a_preemption_that_leaves_enough_reaches_the_controller(tmp_path, monkeypatch):
    where = _run_with_job(tmp_path, monkeypatch, min_nodes=2)

    code = main(["local", "preempt", "lm", "--leave", "2", "--grace", "5", *where])

    assert code == 0
    (request,) = (tmp_path / "local" / "local-1").glob("request-*.json")
    assert '"leave": 2' in request.read_text()


def test_where_no_number_is_left_the_next_start_has_the_fewest_nodes_that_it_can_do_with(
    tmp_path, monkeypatch, capsys
):
    where = _run_with_job(tmp_path, monkeypatch, min_nodes=2)
    assert main(["local", "preempt", "lm", *where]) == 0
    assert capsys.readouterr().out.endswith("its next start has 2 nodes\n")
