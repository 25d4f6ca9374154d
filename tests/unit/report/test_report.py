"""What a report holds: curves, timeline, allocated time, advice, page, text, and the command."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections import Counter
from dataclasses import replace
from html import unescape
from typing import TYPE_CHECKING

import pytest

from hpctrain.cli.main import main
from hpctrain.core.base.text import amount
from hpctrain.core.settings.schema import replaced
from hpctrain.ledger.history.evaluations import EvaluationView
from hpctrain.ledger.history.goodput import Goodput, TimeClass, TimeSlice, window
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import EndCause
from hpctrain.ledger.run import events as ledger
from hpctrain.observe.report import gather as curves
from hpctrain.observe.report.advice import advice
from hpctrain.observe.report.charts import MOST_LINES, charts, timeline
from hpctrain.observe.report.gather import gather
from hpctrain.observe.report.page import as_text, in_script, page
from hpctrain.observe.report.summary import (
    COLOURS,
    evaluation_rows,
    facts,
    failure_groups,
)
from hpctrain.observe.status.status import Answer, status_of
from hpctrain.observe.status.tables import attempt_columns
from tests.support.ledger_runs import Story
from tests.support.report_runs import BEGIN, NASTY, Tale, eventful

if TYPE_CHECKING:
    from hpctrain.ledger.run.layout import RunDir

ALL_CHARTS = [*("timeline", "goodput", "loss", "throughput", "memory", "saves", "waits")]


def data_of(run: RunDir, **more):
    """What is gathered of a run a minute after its last event."""
    events = ledger.read(run)
    now = max((event.t for event in events), default=BEGIN) + 60
    return gather(
        run,
        status_of(
            RunHistory.of(events), Answer(), name=run.name, root=str(run.root), now=now, **more
        ),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_of(eventful(tmp_path_factory.mktemp("runs") / "lm").write())


def drawn(data):
    """The figures of a run by their keys."""
    return {chart.key: chart.figure for chart in charts(data)}


# ---- curves


def test_a_thinned_curve_keeps_its_ends_its_extremes_and_its_gaps():
    noise = random.Random(3)
    points = [(x, noise.random()) for x in range(60_000)]
    points[31_117], points[52_003], points[17_171] = (31_117, 99.0), (52_003, -99.0), (17_171, None)

    thin = curves.thin(points)

    assert len(thin) <= curves.MOST_POINTS
    assert {points[0], points[-1], (31_117, 99.0), (52_003, -99.0), (17_171, None)} <= set(thin)
    assert thin == sorted(thin, key=lambda point: point[0])


def test_steps_that_were_done_again_count_once_in_the_loss_and_twice_in_the_throughput(data):
    kept = data.kept
    again = [mark for mark in data.marks if mark not in kept]

    assert [mark.last for mark in kept] == sorted({mark.last for mark in kept})
    assert {mark.attempt for mark in again} == {2, 3}
    assert sum(mark.steps for mark in again) == data.steps_lost == 160
    rates = [y for _, y in curves.by_time(data.marks, curves.TOKENS.rate) if y is not None]
    assert len(rates) == len(data.marks)


def test_resumes_are_marked_on_the_loss_with_why_and_where(data):
    _, resumed, _ = drawn(data)["loss"]["data"]

    assert resumed["x"] == [one.step for one in data.resumes if one.step]
    assert "attempt 2 resumed from step" in resumed["hovertext"][0]
    assert "on gpu[01-04] after preempted" in resumed["hovertext"][0]


@pytest.fixture(scope="module")
def judged(data):
    """The same run with some of its checkpoints evaluated."""
    rows = [
        EvaluationView(900, "waiting"),
        EvaluationView(600, "evaluated", metrics={NASTY: 0.5, "loss": 2.25}, is_best=True),
        EvaluationView(450, "failed", run="x", why=f"exit code 1 {NASTY}"),
        EvaluationView(300, "evaluated", metrics={"loss": 2.5, "accuracy": 0.25}),
        EvaluationView(150, "evaluated", metrics={"accuracy": 0.25}),
    ]
    return replace(data, status=replace(data.status, evaluations=rows))


def test_what_evaluations_have_found_is_marked_beside_the_loss(judged):
    marks = next(t for t in drawn(judged)["loss"]["data"] if t["name"] == "evaluated loss")

    assert (marks["x"], marks["y"]) == ([300, 600], [2.5, 2.25])
    assert marks["hovertext"][0] == "step 300 evaluated: loss 2.5, accuracy 0.25"
    assert marks["hovertext"][1].startswith("step 600 evaluated, best: &lt;/script&gt;")


def test_evaluations_are_a_table_of_the_page(judged, data):
    shown = page(judged)

    assert NASTY not in shown
    for row in evaluation_rows(judged):
        assert all(cell in unescape(shown) for cell in row), row
    assert [row[1] for row in evaluation_rows(judged)] == [
        "waiting", "evaluated, best", "failed", "evaluated", "evaluated"
    ]  # fmt: skip
    assert 'id="evaluations"' not in page(data)


def test_a_loss_that_is_no_number_breaks_the_curve_and_is_counted(tmp_path):
    tale = Tale(tmp_path / "run").submitted().attempt().train(5)
    lost = json.loads(tale.lines[-1]) | {"loss": "nan"}
    tale.lines[-1] = json.dumps(lost) + "\n"

    chart = next(one for one in charts(data_of(tale.write())) if one.key == "loss")

    assert chart.figure["data"][0]["y"][-1] is None
    assert "1 mark without a number" in chart.words


@pytest.mark.parametrize(
    ("dropped", "unit"),
    [((), "tokens/s"), (("tokens",), "samples/s"), (("tokens", "sample_first"), "steps/s")],
)
def test_throughput_is_in_the_best_unit_that_is_told(tmp_path, dropped, unit):
    tale = Tale(tmp_path / "run").submitted().attempt().train(5)
    raw = [json.loads(line) for line in tale.lines]
    kept = [{k: v for k, v in fact.items() if k not in dropped} for fact in raw]
    tale.lines = [json.dumps(fact) + "\n" for fact in kept]

    chart = next(one for one in charts(data_of(tale.write())) if one.key == "throughput")

    assert chart.figure["layout"]["yaxis"]["title"]["text"] == unit


# ---- goodput


def test_all_allocated_time_is_shown_by_what_it_went_to_the_largest_first(data):
    (trace,) = drawn(data)["goodput"]["data"]
    shares = dict(zip(trace["y"], trace["x"], strict=True))

    assert sum(shares.values()) == pytest.approx(100)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert shares["useful steps"] == pytest.approx(100 * data.status.goodput.useful_of_allocated)
    assert "in the queue" not in shares
    assert len(trace["hovertext"]) == len(trace["y"]) == len(trace["text"])


def test_each_attempt_has_a_line_and_no_second_is_missing_from_it(data):
    found = timeline(data.status.goodput.slices)

    assert found.lines == [1, 2, 3, 4, 5]
    shown = sum(bar.end - bar.start for bar in found.bars)
    assert shown == pytest.approx(sum(s.seconds for s in data.status.goodput.slices), abs=5)
    assert {bar.kind for bar in found.bars}.isdisjoint({TimeClass.DATA, TimeClass.SAVE})
    longest = max(found.bars, key=lambda bar: bar.end - bar.start)
    assert longest.shares[TimeClass.DATA] > 0


def test_of_a_thousand_attempts_the_newest_are_shown():
    slices = []
    for number in range(1, 1001):
        begin = BEGIN + 100 * number
        slices += [
            TimeSlice(begin, begin + 20, TimeClass.QUEUE, None, 0),
            TimeSlice(begin + 20, begin + 30, TimeClass.STARTUP, number, 2),
            TimeSlice(begin + 30, begin + 100, TimeClass.STEP, number, 2),
        ]

    found = timeline(slices)

    assert found.lines == list(range(1001 - MOST_LINES, 1001))
    assert len(found.bars) == 3 * MOST_LINES
    assert sum(bar.end - bar.start for bar in found.bars) == 100 * MOST_LINES


# ---- ranks


def test_waits_say_who_was_waited_for(data):
    found = curves.waits(data.ranks)
    chart = next(one for one in charts(data) if one.key == "waits")

    assert found.slowest == Counter({9: found.samples})
    assert found.behind[9] == pytest.approx(0.12, abs=0.02)
    shares = [sum(column) for column in zip(*(t["y"] for t in chart.figure["data"]), strict=True)]
    assert shares == pytest.approx([100] * 16, abs=0.1)
    assert "most often for rank 9" in chart.words


def test_memory_is_that_of_the_newest_attempt_that_tells(data):
    held = curves.memory(data.ranks)

    assert held.attempt == 5
    assert max(held.peak) == 37 * 2**30
    assert held.retries == 24


# ---- the page


def test_plotly_takes_every_figure(data):
    from plotly.graph_objects import Figure

    for chart in charts(data):
        assert Figure(chart.figure).to_dict()["data"], chart.key
        assert chart.words.endswith((".", ")")), chart.words


def test_what_a_run_says_stays_text(data):
    text = page(data)
    own = text.replace(_plotly(text), "")

    assert NASTY not in text
    assert unescape(own).count(NASTY) == 2
    assert len(re.findall(r"<script", own)) == 3
    assert len(re.findall(r"</script", own)) == 3
    assert "<img" not in own
    assert json.loads(_figures(own)).keys() == set(ALL_CHARTS)
    assert "<" not in _figures(own)


def _figures(text):
    return re.search(r'id="figures">(.*?)</script>', text)[1]


def _plotly(text):
    return max(re.findall(r"<script>(.*?)</script>", text, re.DOTALL), key=len)


def test_plotly_would_show_a_hostile_node_name_as_it_is(tmp_path):
    tale = Tale(tmp_path / "run")
    tale.nodes = ["<b>n1</b>", "n2&amp;"]
    run = tale.submitted().attempt().train(3).write()

    text = json.dumps(drawn(data_of(run)))

    assert "<b>n1" not in text
    assert "&lt;b&gt;n1" in text


def test_json_in_a_script_cannot_end_it():
    value = {"x": NASTY, "y": "<!--", "z": "&lt;"}

    assert not set("<>&") & set(in_script(value))
    assert json.loads(in_script(value)) == value


def test_the_page_names_no_other_address(data):
    own = page(data)
    own = own.replace(_plotly(own), "")

    named = re.findall(r'(?:src|href)="([^"]*)"', own)
    assert {one[0] for one in named if one != "data:,"} == {"#"}
    assert not re.search(r"https?:|url\(|@import", own)
    assert "default-src 'none'" in own


def attempt_rows(data):
    """The page's table of attempts: each row by its titles."""
    table = unescape(page(data)).partition('<section id="attempts">')[2].partition("</table>")[0]
    titles = re.findall(r"<th scope[^>]*>(.*?)</th>", table)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_the_page_shows_the_numbers_and_each_attempt_as_status_does(data):
    shown = unescape(page(data))

    for one in facts(data):
        assert one.value in shown, one
    rows = attempt_rows(data)
    assert [row["#"] for row in rows] == [str(one.number) for one in data.status.attempts]
    assert [row["lost"] for row in rows] == [f"{one.steps_lost:,}" if one.steps_lost is not None
                                            else "-" for one in data.status.attempts]  # fmt: skip
    assert {row["where"] for row in rows} == {"gpu[01-04]"}
    assert '<th scope="col" class="number">lost</th>' in shown
    assert '<th scope="col">where</th>' in shown


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [(None, None, "-"), (1600, None, "1,600-?"), (0, 0, "0-0"), (1600, 2750, "1,600-2,750")],
)
def test_a_last_step_that_nobody_told_is_not_said_to_be_the_first(data, first, last, said):
    view = replace(data.status.attempts[0], first_step=first, last_step=last)
    columns = attempt_columns(data.status, [view, data.status.attempts[1]])

    assert next(one.cells[0] for one in columns if one.title == "steps") == said


def test_text_shows_the_same_advice_as_the_page(data):
    text, shown = as_text(data, width=2000), unescape(page(data))

    assert advice(data)
    for one in advice(data):
        assert one.evidence in text
        assert one.evidence in shown


def test_a_report_says_what_a_run_has_survived_and_where_its_state_came_from(tmp_path):
    tale = Tale(tmp_path / "run").submitted()
    tale.number = 1
    tale.add("attempt_started", nodes=["n1", "n2"], world_size=2, job_id="4711")
    tale.add("restored", step=30, checkpoint="step-30", read_from="memory")
    tale.add("steps", first=31, last=40)
    tale.add("node_lost", node="n2", why="it is silent")
    tale.add("batch_skipped", step=35, first=8, last=16, why="spike")
    data = data_of(tale.write())

    told = {one.label: (one.value, one.more) for one in facts(data)}
    assert told["round"] == ("n[1-2] in training", "n2 lost (it is silent)")
    assert told["guards"] == (
        "1 update left out",
        "step 35: the update of samples 8 to 15 is left out: a spike",
    )
    (row,) = attempt_rows(data)
    assert (row["steps"], row["from"]) == ("30-40", "memory")
    assert "n2 lost (it is silent)" in unescape(page(data))


def test_attempts_that_failed_alike_are_told_once(tmp_path):
    tale = Tale(tmp_path / "run").submitted()
    for _ in range(3):
        tale.attempt().train(1).failed("gpu01", "ValueError: x", "Traceback\n ValueError: x")
        tale.ended("crashed", "restart")

    (group,) = failure_groups(data_of(tale.write()))

    assert group.attempts == (1, 2, 3)


def test_a_run_in_a_terminal_has_no_end_on_record_and_is_done_all_the_same(tmp_path):
    tale = Tale(tmp_path / "run").submitted().attempt().train(3)
    (row,) = attempt_rows(data_of(tale.add("done", step=tale.step).write()))

    assert row["ended"] == "unknown"


def test_checkpoints_of_unknown_steps_are_said_and_not_drawn(tmp_path):
    tale = Tale(tmp_path / "run").submitted().attempt()
    for second in range(300):  # more than a chart has places for
        tale.add("sealed", path="out/ckpt.pt", bytes=second, seconds=1.0, by="agent")

    drawn = {chart.key: chart for chart in charts(data_of(tale.write()))}

    assert drawn["saves"].figure is None
    assert drawn["saves"].words == "No checkpoint of a known step was committed."


def test_saves_that_did_not_come_are_counted_beside_those_that_did(tmp_path):
    tale = Tale(tmp_path / "run").submitted().attempt().train(4).saved()
    tale.add("save_failed", step=4, why="full").add("save_skipped", step=5, why="busy")

    (chart,) = (one for one in charts(data_of(tale.write())) if one.key == "saves")

    assert chart.words.startswith("1 save: ")
    assert chart.words.endswith(" 2 more failed or were left out.")


# ---- damage


def _nothing(tale):
    tale.run.root.joinpath("spec.json").unlink()
    tale.run.events.unlink()


def _torn(tale):
    content = tale.run.events.read_bytes()
    tale.run.events.write_bytes(content[:-40])


def _noise(tale):
    strange = ['{"t": 1, "kind": "steps", "attempt": 1, "first": "x", "last": null}', "[]", "\0\0"]
    strange += ['{"t": 1e9, "kind": "saved", "attempt": 1}', '{"kind": "steps"}', "{"]
    strange += ['{"t": 2e9, "kind": "excluded", "attempt": 9, "nodes": 7}']
    strange += ['{"t": 2e9, "kind": "restored", "attempt": 9, "step": "many"}']
    strange += ['{"t": 2e9, "kind": "failure", "attempt": 9, "summary": "\\ud800"}']
    tale.run.events.write_text("\n".join(strange))


def _torn_samples(tale):
    path = tale.run.rank_times(1)
    path.parent.mkdir(parents=True)
    good = {"t": BEGIN, "step": 1, "steps": 1, "wall_s": [1.0, 2.0]}
    odd = {**good, "own_s": [1.0], "mem_peak_bytes": ["x", 1]}
    lines = [json.dumps(good), json.dumps(odd), '{"t": 1, "wall', "7", json.dumps(good)[:30]]
    path.write_text("\n".join(lines))


def _bad_spec(tale):
    tale.run.spec.write_text('{"format": 3')


@pytest.mark.parametrize("damage", [_nothing, _torn, _noise, _torn_samples, _bad_spec])
def test_a_damaged_run_has_a_page_that_says_what_is_missing(tmp_path, damage):
    tale = Tale(tmp_path / "run").submitted().attempt().train(4)
    tale.write()
    damage(tale)

    data = data_of(tale.run)
    text = page(data)

    assert as_text(data)
    for chart in charts(data):
        assert chart.figure is not None or re.search(r"\bno\b|Nothing", chart.words, re.IGNORECASE)
    drawn = [chart for chart in charts(data) if chart.figure is not None]
    assert text.count("<section") == len(drawn) + 4
    assert text.count("No data for ") == (len(drawn) < len(ALL_CHARTS))
    expected = {_nothing: 2, _torn_samples: 1, _bad_spec: 1}.get(damage, 0)
    assert len(data.problems) == expected, data.problems


def test_a_run_of_a_thousand_attempts_keeps_a_page_that_one_can_use(tmp_path):
    tale = Tale(tmp_path / "run", nodes=2, per_node=2).submitted(total=1_300_000)
    for _ in range(1000):
        tale.attempt(queue_s=60).train(4, save_every=2).failed("gpu01", NASTY, NASTY * 40)
        tale.ended("crashed", "requeue")
    data = data_of(tale.write())

    text = page(data)

    assert len(data.marks) == 5_000
    assert len(text) - len(_plotly(text)) < 1_500_000
    for key, figure in drawn(data).items():
        for trace in figure["data"] if figure else ():
            assert len(trace.get("x", ())) <= curves.MOST_POINTS, key


# ---- advice


def spent(**shares):
    """An hour of two nodes with these shares of it, the rest of it useful."""
    t, slices = BEGIN, []
    shares["step"] = 1 - sum(share for kind, share in shares.items() if kind != "queue")
    for kind, share in shares.items():
        queue = kind == "queue"
        one = TimeSlice(
            t, t + 3600 * share, TimeClass(kind), None if queue else 1, 0 if queue else 2
        )
        slices.append(one)
        t = one.end
    return window(Goodput(tuple(slices), reports_steps=True), 0.0)


@pytest.fixture
def quiet(tmp_path):
    """A run that nothing can be said against."""
    tale = Tale(tmp_path / "quiet").submitted().attempt(queue_s=30).train(30)
    data = data_of(tale.sample(slow=99).saved().write())
    plain = tuple(
        replace(one, retries=None, reserved_bytes=None, peak_bytes=None) for one in data.ranks
    )
    return replace(data, ranks=plain, status=replace(data.status, goodput=spent(save=0.001)))


def keys(data):
    return [one.key for one in advice(data)]


def test_a_quiet_run_gets_no_advice(quiet):
    assert keys(quiet) == []
    assert "nothing to advise" in as_text(quiet)
    assert "Nothing to advise" in page(quiet)


def test_a_program_that_tells_nothing_is_advised_to_tell_and_nothing_is_claimed(tmp_path):
    story = Story(tmp_path / "plain").submitted("17").started(1)
    story.ended(1, "preempted", "requeue").started(2)
    data = data_of(story.run)

    rows = {one.label: (one.value, one.more) for one in facts(data)}

    assert rows["steps lost"] == ("not known", "the program has reported no step")
    assert rows["step"][0] == "not known"
    assert keys(data) == ["tells-nothing"]
    assert "run.should_stop()" in as_text(data)
    assert "othing to advise" not in as_text(data) + page(data)


@pytest.mark.parametrize(
    ("kind", "share", "key"),
    [
        ("save", 0.03, "blocking-saves"),
        ("data", 0.08, "data-wait"),
        ("startup", 0.09, "start-up"),
        ("warm_up", 0.07, "warm-up"),
        ("stall", 0.04, "stall"),
        ("no_progress", 0.03, "no-progress"),
    ],
)
def test_a_large_share_of_a_class_is_named_with_its_number(quiet, kind, share, key):
    status = replace(quiet.status, goodput=spent(**{kind: share}))

    (found,) = advice(replace(quiet, status=status))

    assert found.key == key
    assert f"{100 * share:.1f} %" in found.evidence
    assert found.do


@pytest.mark.parametrize(
    ("setting", "kind", "words"),
    [
        ("restart", "hang", "run.section"),
        ("restart", "ranks_awaited", "run.end_wait_s"),
        ("tell", "hang", "alive.hang=restart"),
    ],
)
def test_ranks_that_stood_still_are_named_with_what_helps(tmp_path, setting, kind, words):
    tale = Tale(tmp_path / "hung").submitted().attempt(queue_s=30).train(30)
    tale.add(kind, ranks=[3], summary="1 rank waits for rank 3", stood_s=200.0)
    hung = data_of(tale.write())
    hung.spec.settings = replaced(hung.spec.settings, {"alive.hang": setting})

    (found,) = advice(replace(hung, status=replace(hung.status, goodput=spent(no_progress=0.2))))

    assert found.key == "no-progress"
    assert "in 1 attempt" in found.evidence
    assert ("attempt 1: 1 rank waits for rank 3" in found.evidence) == (kind == "hang")
    assert words in found.do


@pytest.mark.parametrize(
    ("peak", "reserved", "retries", "words"),
    [
        (45, 70, 0, "rank 1 never used 25.0 GiB of the 70.0 GiB that it reserved"),
        (69, 70, 3, "that it reserved; 3 allocations were tried again"),
        (69, 70, 0, None),
        (1, 1.5, 0, None),
    ],
)
def test_memory_in_pieces_is_named(quiet, peak, reserved, retries, words):
    one = replace(
        quiet.ranks[-1],
        wall_s=(1.0, 1.0),
        data_s=None,
        own_s=None,
        peak_bytes=(float(2**30), peak * 2.0**30),
        reserved_bytes=(float(2**30), reserved * 2.0**30),
        retries=(0.0, float(retries)),
    )

    found = advice(replace(quiet, ranks=(one,)))

    assert [words in each.evidence for each in found] == ([] if words is None else [True])


def test_the_same_share_of_a_short_run_is_no_reason(quiet):
    short = window(spent(startup=0.5), BEGIN + 3300)

    assert keys(replace(quiet, status=replace(quiet.status, goodput=short))) == []


def with_attempts(quiet, *attempts, goodput=None):
    first = quiet.status.attempts[0]
    views = [replace(first, number=n, **more) for n, more in enumerate(attempts, start=1)]
    status = replace(quiet.status, attempts=views, goodput=goodput or quiet.status.goodput)
    return replace(quiet, status=status)


def failure(view, node, summary="killed by SIGKILL"):
    from hpctrain.ledger.history.run_records import Failure

    return {"failure": Failure(view, 0, node, "signal", summary), "cause": EndCause.CRASHED}


def test_a_node_that_ended_two_attempts_is_named_but_not_for_the_programs_own_error(quiet):
    bad = with_attempts(quiet, failure(1, "gpu02"), {}, failure(3, "gpu02"))
    own = with_attempts(
        quiet, failure(1, "gpu02", "E"), failure(2, "gpu02", "E"), failure(3, "gpu01", "E")
    )

    (found,) = advice(bad)

    assert found.key == "bad-node"
    assert found.title.startswith("gpu02 ")
    assert "slurm.exclude=gpu02" in found.do
    assert keys(own) == []


def test_steps_done_again_are_laid_to_what_ended_the_attempts(quiet):
    redone = spent(redone=0.06)
    killed = with_attempts(
        quiet, {"steps_lost": 70, "cause": EndCause.NODE_FAIL, "ended": BEGIN}, {}, goodput=redone
    )
    warned = with_attempts(
        quiet, {"steps_lost": 70, "cause": EndCause.WALLTIME, "ended": BEGIN}, {}, goodput=redone
    )

    assert [one.key for one in advice(killed)] == ["lost-steps"]
    assert "70 steps" in advice(killed)[0].evidence
    assert "max_loss_s" in advice(killed)[0].do
    assert "signal_lead_s" in advice(warned)[0].do


# ---- the command


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("lm-1", "lm-2"):
        Tale(tmp_path / "runs" / name).submitted().attempt().train(5).write()
    return tmp_path / "runs"


def test_the_page_lies_in_the_runs_directory(runs, capsys):
    assert main(["report", "lm-1"]) == 0

    page_there = runs / "lm-1" / "report.html"
    assert page_there.read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out.startswith(f"wrote {page_there} (")
    assert [path.name for path in page_there.parent.glob("*.new")] == []


def test_several_runs_have_a_page_each(runs):
    assert main(["report", "lm-1", "lm-2"]) == 0

    assert (runs / "lm-2" / "report.html").is_file()


def test_json_tells_what_status_tells_and_where_the_page_is(runs, capsys):
    main(["status", "lm-1", "--json"])
    status = json.loads(capsys.readouterr().out)

    assert main(["report", "lm-1", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["pages"] == [str(runs / "lm-1" / "report.html")]
    (one,) = told["runs"]
    assert one["attempts"][0]["number"] == 1
    assert one["goodput"].keys() == status["goodput"].keys()
    assert one["advice"] == []


def test_text_fits_the_terminal_and_writes_nothing(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    assert main(["report", "lm-1", "--text"]) == 0

    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "nothing to advise" in out
    assert not (runs / "lm-1" / "report.html").exists()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["lm-1", "--text", "-o", "x"], 2, "leave out -o x, or --text"),
        (["lm-1", "--text", "--open"], 2, "leave one of them out"),
        (["lm-1", "lm-2", "-o", "x"], 2, "leave -o out"),
        (["lm-1", "-o", "no/such/x"], 2, "no/such/x cannot be written: No such file"),
        (["lm-9"], 4, "did you mean"),
    ],
)
def test_what_cannot_be_done_is_one_line(runs, capsys, argv, code, words):
    assert main(["report", *argv]) == code

    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_run_that_counted_nothing_has_a_throughput_of_nothing(runs):
    story = Story(runs / "idle").submitted().started(1)
    for last in (5, 10):
        story.add("steps", 1, first=last - 4, last=last, tokens=0, seconds=2.5)

    assert main(["report", "idle"]) == 0

    assert "best 0" in (runs / "idle" / "report.html").read_text()


def test_a_page_is_written_through_no_link_that_somebody_has_put_there(runs, tmp_path, monkeypatch):
    (tmp_path / "victim").write_text("kept")
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda _bytes: "guessed")
    for name in (f".page.html.{os.getpid()}.new", ".page.html.guessed.new"):
        (shared / name).symlink_to(tmp_path / "victim")

    assert main(["report", "lm-1", "-o", str(shared / "page.html")]) == 2
    assert (tmp_path / "victim").read_text() == "kept"
    monkeypatch.undo()
    monkeypatch.chdir(runs.parent)
    assert main(["report", "lm-1", "-o", str(shared / "page.html")]) == 0
    assert (shared / "page.html").read_text().startswith("<!")


def test_without_a_screen_open_says_how_to_bring_the_page_home(runs, capsys):
    assert main(["report", "lm-1", "--open"]) == 0

    assert f":{runs}/lm-1/report.html ." in capsys.readouterr().err


def test_a_figure_is_short_and_never_nan():
    from hpctrain.observe.report.summary import percent

    assert amount(43_712.0) == "43.7k"
    assert percent(0.0004) == "0.04 %"
    assert percent(math.inf) == "-"


def test_a_program_that_reports_no_step_has_no_loss_of_time_and_one_line_for_what_is_not_there(
    tmp_path,
):
    tale = Story(tmp_path / "run").submitted().started(1)
    tale.t += 600
    tale.ended(1, "timed_out", "requeue")

    data = data_of(tale.run)
    chart = next(chart for chart in charts(data) if chart.key == "goodput")

    assert chart.figure is not None
    trace = chart.figure["data"][0]
    assert "running" in trace["y"]
    assert "other" not in trace["y"]
    at = trace["y"].index("running")
    assert trace["marker"]["color"][at] == COLOURS[TimeClass.OTHER]
    assert "no share is called useful" in chart.words
    assert page(data).count('class="none"') <= 2
    assert "No data for loss, " in page(data)
