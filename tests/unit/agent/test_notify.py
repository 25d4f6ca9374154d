"""Who is to be notified hears of a run's end, and cannot delay or break it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from hpctrain.core.base.records import JobFacts
from hpctrain.core.settings.schema import NotifySettings, Settings
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import UsageError
from hpctrain.launch.checks import check_hooks_here
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.events import read
from hpctrain.node.agent import notify_child
from hpctrain.node.agent.batch_side import BatchScriptSide, JobStartFacts
from hpctrain.node.agent.notify import notification_of, notify
from tests.support.ledger_runs import Story, all_fields

LONG_S = 60.0
SECRET = "s3cret-path"  # noqa: S105 - no password of anybody


@pytest.fixture
def story(tmp_path):
    story = Story(tmp_path / "gpt").submitted().started(1).restored(1)
    return story.steps(1, 1, 40, loss=2.5).saved(1, 30)


def asked(story, **fields):
    """[notify] as the run's spec has it."""
    spec = load_spec(story.run.spec)
    notify = NotifySettings(**{"timeout_s": LONG_S, "plain_http": True, **fields})
    spec.settings = replace(spec.settings, notify=notify)
    spec.dump(story.run.spec)
    return spec.settings.notify


def script(folder, text):
    path = folder / "hear.py"
    path.write_text(text)
    return f"{sys.executable} {path}"


def tell(story, attempt=1):
    """The child, in this process; gives what it wrote into the ledger."""
    notify_child.main([str(story.run.root), str(attempt)])
    return [all_fields(e) for e in read(story.run) if e.kind == "notified"]


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch):
    monkeypatch.setattr("hpctrain.node.agent.signals.ignore_all", lambda: None)


@pytest.fixture
def server():
    """An HTTP server; gives what was posted to it. `server.answer` is its status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            server.heard.append((self.path, self.headers["Content-Type"], json.loads(content)))
            server.arrived.set()
            server.go.wait(LONG_S)
            self.send_response(server.answer)
            if 300 <= server.answer < 400:
                self.send_header("Location", "/login")
            self.end_headers()

        def do_GET(self):
            server.heard.append((self.path, "GET", None))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.heard, server.answer = [], 200
    server.arrived, server.go = threading.Event(), threading.Event()
    server.go.set()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.go.set()
    server.shutdown()
    thread.join()
    server.server_close()


def hook(tmp_path, server):
    path = tmp_path / "hook"
    path.write_text(f"http://127.0.0.1:{server.server_port}/{SECRET}\n")
    return str(path)


# ---- the news


@pytest.mark.parametrize(
    ("reason", "following", "more", "what"),
    [
        ("completed", "stop", {}, "done"),
        ("user_error", "stop", {"exit_code": 1}, "failed"),
        ("crashed", "stop", {"exit_code": 93}, "stopped"),
        ("crashed", "stop", {}, "failed"),
        ("cancelled", "stop", {}, "stopped"),
        ("stopped", "stop", {}, "stopped"),
        ("preempted", "requeue", {}, "attempt"),
        ("node_failed", "leave", {}, "attempt"),
        ("crashed", "restart", {}, "attempt"),
    ],
)
def test_every_end_is_news_of_one_kind(story, reason, following, more, what):
    story.ended(1, reason, following, step=42)
    if more:
        story.add("run_stopped", 1, reason=reason, detail="enough", **more)

    assert notification_of(story.run, RunHistory.read(story.run), 1).what == what


def test_news_say_what_one_needs_to_know(story):
    story.add("failure", 1, summary="ValueError: bad batch", rank=3)
    story.ended(1, "crashed", "stop", step=42, detail="a rank failed")
    story.add("run_stopped", 1, reason="crashed", exit_code=93, detail="5 crashes: the budget")

    news = notification_of(story.run, RunHistory.read(story.run), 1)

    assert (news.run, news.attempt, news.job_id, news.reason) == ("gpt", 1, "17", "crashed")
    assert (news.step, news.saved_step, news.steps_lost, news.loss) == (42, 30, 12, 2.5)
    assert news.why == "5 crashes: the budget"
    assert news.next == f"hpctrain resume {story.run.root}"
    assert news.text == "gpt: stopped at step 42 (crashed): 5 crashes: the budget"
    assert news.left_out == 0


def test_news_say_how_many_updates_guards_have_left_out(story):
    for step in (3, 9):
        story.add("batch_skipped", 1, step=step, first=8 * step, last=8 * step + 8, why="spike")
    story.add("done", 1, step=42).ended(1, "completed", "stop", step=42)

    news = notification_of(story.run, RunHistory.read(story.run), 1)

    assert news.left_out == 2
    assert news.text == "gpt: done at step 42; 2 updates left out by guards"


def test_a_job_that_nobody_could_requeue_has_failed(story):
    story.ended(1, "preempted", "requeue", step=40)
    story.add("requeue_failed", 1, by="agent", why="no scontrol")
    assert notification_of(story.run, RunHistory.read(story.run), 1).what == "failed"

    story.add("requeued", 1, by="batch")

    assert notification_of(story.run, RunHistory.read(story.run), 1).what == "attempt"


def test_an_attempt_that_goes_on_is_no_news(story):
    assert notification_of(story.run, RunHistory.read(story.run), 1) is None
    asked(story, command="/no/such/program")
    assert tell(story) == []


# ---- the telling


def test_a_command_gets_the_news_as_json_and_as_variables(story, tmp_path):
    heard = tmp_path / "heard"
    text = """
import json, os, sys
heard = [json.load(sys.stdin), dict(os.environ), sys.argv[1:]]
open("heard", "w").write(json.dumps(heard))
"""
    asked(story, command=script(tmp_path, text) + " 'two words'")
    spec = load_spec(story.run.spec)
    spec.entry.cwd = str(tmp_path)
    spec.dump(story.run.spec)
    story.ended(1, "completed", "stop", step=40)

    assert tell(story) == [{"what": "done", "ok": True, "why": ""}]
    news, variables, words = json.loads(heard.read_text())
    assert news == asdict(notification_of(story.run, RunHistory.read(story.run), 1))
    assert variables["HPCTRAIN_NOTIFY_WHAT"] == "done"
    assert variables["HPCTRAIN_NOTIFY_STEP"] == "40"
    assert words == ["two words"]


def test_nobody_hears_the_same_news_twice_or_what_was_not_asked_for(story, tmp_path):
    command = script(tmp_path, "open('heard', 'a').write('x')")
    asked(story, command=command, on=["failed"])
    story.ended(1, "completed", "stop", step=40)
    assert tell(story) == []

    asked(story, command=command, on=["attempt"])  # each end, whatever it is
    tell(story)
    told = tell(story)

    assert [one["what"] for one in told] == ["done"]
    assert (story.run.root / "heard").read_text() == "x"


def test_a_webhook_gets_the_news_and_its_url_is_written_nowhere(story, tmp_path, server):
    asked(story, webhook_file=hook(tmp_path, server))
    story.ended(1, "completed", "stop", step=40)

    assert tell(story) == [{"what": "done", "ok": True, "why": ""}]
    ((path, kind, news),) = server.heard
    assert (path, kind) == (f"/{SECRET}", "application/json")
    assert news["text"] == "gpt: done at step 40"
    _assert_secret_is_kept(story)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/" + SECRET, "webhook: Connection refused"),
        (f"http://127.0.0.1:9/{SECRET} x", "webhook: InvalidURL"),
        (f"http:///{SECRET}", "webhook: "),
        (SECRET, "it holds no http or https URL"),
        ("\udcff" + SECRET, "it holds no http or https URL"),
    ],
)
def test_a_webhook_that_fails_is_in_the_ledger_without_its_url(story, tmp_path, url, said):
    (tmp_path / "hook").write_text(url, errors="surrogateescape")
    asked(story, webhook_file=str(tmp_path / "hook"))
    story.ended(1, "completed", "stop", step=40)

    (told,) = tell(story)

    assert not told["ok"]
    assert said in told["why"]
    _assert_secret_is_kept(story)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_server_that_sends_elsewhere_has_not_heard_it(story, tmp_path, server, code):
    server.answer = code
    asked(story, webhook_file=hook(tmp_path, server))
    story.ended(1, "completed", "stop", step=40)

    (told,) = tell(story)

    assert (told["ok"], told["why"]) == (False, f"webhook: the server answered {code}")
    assert len(server.heard) == 1
    _assert_secret_is_kept(story)


def test_a_url_that_everybody_on_the_way_can_read_is_used_on_request_only(story, tmp_path, server):
    settings = asked(story, webhook_file=hook(tmp_path, server), plain_http=False)
    story.ended(1, "completed", "stop", step=40)

    assert "notify.plain_http is false" in tell(story)[0]["why"]
    assert server.heard == []
    with pytest.raises(UsageError, match=r"holds an http:// URL.*use https://"):
        check_hooks_here(Settings(notify=settings), {}, tmp_path)
    _assert_secret_is_kept(story)


def test_a_server_that_refuses_or_hangs_is_in_the_ledger(story, tmp_path, server):
    server.answer = 403
    asked(story, webhook_file=hook(tmp_path, server))
    story.ended(1, "completed", "stop", step=40)
    assert tell(story)[-1]["why"] == "webhook: the server answered 403"

    server.go.clear()
    asked(story, webhook_file=hook(tmp_path, server), timeout_s=0.2)
    story.started(2).ended(2, "completed", "stop", step=40)

    why = tell(story, 2)[-1]["why"]
    assert why.startswith("webhook: ")
    assert why != "webhook: the server answered 403"
    assert len(server.heard) == 2


def _assert_secret_is_kept(story):
    for path in story.run.root.rglob("*"):
        assert not path.is_file() or SECRET not in path.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit('no\\nnetwork')", "exit code 1: no network"),
        ("import sys; sys.stderr.write('y' * 9_000_000); sys.exit(3)", "code 3: yy"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_a_command_that_fails_is_in_the_ledger_in_a_few_words(story, tmp_path, text, said):
    asked(story, command=script(tmp_path, text))
    story.ended(1, "completed", "stop", step=40)

    (told,) = tell(story)

    assert not told["ok"]
    assert said in told["why"]
    assert len(told["why"]) < 1000


def test_a_command_that_floods_its_output_is_no_failure(story, tmp_path):
    asked(story, command=script(tmp_path, "for _ in range(200): print('y' * 65536)"))
    story.ended(1, "completed", "stop", step=40)

    assert tell(story) == [{"what": "done", "ok": True, "why": ""}]


def test_a_missing_command_is_in_the_ledger_as_not_heard(story):
    asked(story, command="no-such-program --x")
    story.ended(1, "completed", "stop", step=40)

    why = "no-such-program: No such file or directory"
    assert tell(story) == [{"what": "done", "ok": False, "why": why}]


def test_a_command_that_hangs_is_killed_with_its_children(story, tmp_path):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    # It and its child hold the pipe open until they are dead: reading to its end awaits that.
    text = f"""
import os
pipe = os.open({str(fifo)!r}, os.O_WRONLY)
os.set_inheritable(pipe, True)
os.system("echo x >&{{0}}; sleep 1000".format(pipe))
"""
    command = script(tmp_path, text)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    asked(story, command=command, timeout_s=1.0)
    story.ended(1, "completed", "stop", step=40)

    (told,) = tell(story)

    assert "killed after 1 s" in told["why"]
    assert os.read(reader, 9) == b"x\n"
    assert os.read(reader, 9) == b""
    os.close(reader)


# ---- the starting


def test_starting_it_waits_for_nothing_and_what_hangs_is_ended(story, tmp_path):
    """A real child, which SIGTERM does not end: a requeue sends it to every process of the job."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    settings = asked(story, command=script(tmp_path, f"open({str(gate)!r}).read()"))
    story.ended(1, "completed", "stop", step=40)

    child = notify(story.run, settings, 1)
    assert child.poll() is None
    with gate.open("w"):  # opens once the command has: it runs, and we were not kept
        os.kill(child.pid, signal.SIGTERM)
        assert child.poll() is None
    child.wait(LONG_S)

    told = [all_fields(e) for e in read(story.run) if e.kind == "notified"]
    assert told == [{"what": "done", "ok": True, "why": ""}]
    assert os.getsid(0) != child.pid


def test_nothing_is_started_where_nobody_asked(story):
    assert notify(story.run, NotifySettings(), 1) is None
    assert notify(story.run, NotifySettings(command="x", on=[]), 1) is None


class Gone:
    """A scheduler whose job was cancelled."""

    def facts(self):
        return JobFacts(state="CANCELLED", restarts=0)

    def forbid_requeue(self):
        pass


def test_the_batch_side_tells_of_the_end_that_agents_wrote_or_could_not(story, tmp_path, server):
    asked(story, webhook_file=hook(tmp_path, server), on=["done", "failed", "stopped"])
    side = BatchScriptSide(
        story.run, JobStartFacts("17", 0, "tok-1", ["n1"], rc=1, term=True), Gone()
    )

    side.finish()
    side.wait_notified()

    told = [all_fields(e) for e in read(story.run) if e.kind == "notified"]
    assert [one["ok"] for one in told] == [True]
    assert [news["what"] for _, _, news in server.heard] == [told[0]["what"]]


def test_a_spec_that_cannot_be_read_does_not_change_the_jobs_exit_code(story):
    story.ended(1, "completed", "stop", step=40).add("done", 1, step=40)
    story.run.spec.write_text("{}")
    side = BatchScriptSide(
        story.run, JobStartFacts("17", 0, "tok-1", ["n1"], rc=0, term=False), Gone()
    )

    assert side.finish() == 0
    side.wait_notified()
