from __future__ import annotations

import contextlib
import math
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format.manifest import DELETING, MANIFEST_NAME
from hpctrain.checkpoint.store import commit, find, retention
from hpctrain.checkpoint.store.retention import CheckpointRow, Rules, Why, why_kept
from hpctrain.errors import CheckpointError, ChecksFailed, Fenced, NotFound, RunAlive
from hpctrain.ledger.history.evaluations import Evaluations
from hpctrain.ledger.history.run_history import RunHistory
from tests.support import checkpoints as support
from tests.support import small_disk as disks
from tests.support.ledger_runs import Story

small_disk = disks.small_disk

LOSSES = st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, math.nan, math.inf, -math.inf, None])
"""Few values, so that there are ties; None for a step at which nothing was logged."""
ROWS = st.dictionaries(
    st.integers(0, 60), st.tuples(st.booleans(), st.booleans(), LOSSES), max_size=15
).map(
    lambda found: [
        CheckpointRow(step, valid, pinned, {} if loss is None else {"loss": loss})
        for step, (valid, pinned, loss) in found.items()
    ]
)
RULES = st.fixed_dictionaries(
    {
        "keep_last": st.integers(1, 5),
        "keep_every": st.integers(0, 10),
        "keep_best": st.integers(0, 4),
        "best_metric": st.just("loss"),
        "best_is": st.sampled_from(["lowest", "highest"]),
        "protect": st.sets(st.integers(0, 60), max_size=3),
        "awaited": st.sets(st.integers(0, 60), max_size=3),
    }
)


def to_delete(rows, *, protect=(), awaited=(), **rules):
    """The steps that need not be kept, oldest first."""
    defaults = {"keep_every": 0, "keep_best": 0, "best_metric": "", "best_is": "lowest"}
    kept = why_kept(rows, Rules(**{**defaults, **rules}), protect, awaited)
    return sorted(step for step, why in kept.items() if not why)


def rows(*steps, **losses):
    """Valid rows of these steps; `s1000=0.5` is one with that loss."""
    found = [CheckpointRow(step, valid=True) for step in steps]
    return found + [
        CheckpointRow(int(n[1:]), valid=True, metrics={"loss": v}) for n, v in losses.items()
    ]


def valid_steps(found):
    """Steps of the valid ones, newest first."""
    return sorted((row.step for row in found if row.valid), reverse=True)


def best(found, rules):
    """The best ones, found the slow way: one after the other, the newer of equal ones first."""
    left = {
        row.step: row.metrics["loss"]
        for row in found
        if row.valid and math.isfinite(row.metrics.get("loss", math.nan))
    }
    choose = min if rules["best_is"] == "lowest" else max
    taken = []
    while left and len(taken) < rules["keep_best"]:
        value = choose(left.values())
        step = max(step for step, loss in left.items() if loss == value)
        taken.append(step)
        del left[step]
    return taken


def needed(row, found, rules):
    """Whether a rule asks for a row that is not among the newest."""
    every = rules["keep_every"]
    return (
        row.pinned
        or row.step in rules["protect"] | rules["awaited"]
        or (every and row.step % every == 0)
        or row.step in best(found, rules)
    )


def test_the_last_ones_and_every_so_many_stay():
    found = rows(*range(1000, 8000, 1000))

    gone = to_delete(found, keep_last=2, keep_every=3000, protect={1000})

    assert gone == [2000, 4000, 5000]


def test_torn_ones_never_count():
    found = [*rows(1000, 2000), CheckpointRow(3000, valid=False), CheckpointRow(4000, valid=False)]

    assert to_delete(found, keep_last=2) == []
    assert to_delete(found, keep_last=1) == [1000]


def test_pinned_ones_stay_torn_or_not():
    found = [
        CheckpointRow(1000, valid=True, pinned=True),
        CheckpointRow(2000, valid=False, pinned=True),
        *rows(3, 4),
    ]

    assert to_delete([*found, *rows(5000)], keep_last=1) == [3, 4]


def test_the_best_ones_stay_wherever_they_lie():
    found = rows(s1000=3.0, s2000=1.0, s3000=2.0, s4000=5.0, s5000=4.0)
    rule = {"keep_last": 1, "keep_best": 2, "best_metric": "loss"}

    assert to_delete(found, **rule) == [1000, 4000]
    assert to_delete(found, **rule, best_is="highest") == [1000, 2000, 3000]


@pytest.mark.parametrize("best_is", ["lowest", "highest"])
def test_of_equal_ones_the_newer_stays(best_is):
    found = rows(5000, s1000=1.0, s2000=1.0, s3000=1.0)

    gone = to_delete(found, keep_last=1, keep_best=1, best_metric="loss", best_is=best_is)

    assert gone == [1000, 2000]


@pytest.mark.parametrize("best_is", ["lowest", "highest"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_never_best(best_is, value):
    found = rows(1000, s2000=value, s3000=1.0, s4000=value, s5000=value)

    gone = to_delete(found, keep_last=1, keep_best=2, best_metric="loss", best_is=best_is)

    assert gone == [1000, 2000, 4000]


def test_a_torn_one_is_never_best():
    found = [CheckpointRow(1000, valid=False, metrics={"loss": 0.0}), *rows(s2000=1.0, s3000=2.0)]

    assert to_delete(found, keep_last=1, keep_best=1, best_metric="loss") == [1000]


@given(found=ROWS, rules=RULES)
def test_nothing_goes_that_must_stay(found, rules):
    gone = to_delete(found, **rules)

    valid = valid_steps(found)
    keep_last = rules["keep_last"]
    kept_valid = [step for step in valid if step not in gone]
    assert set(valid[:1]).isdisjoint(gone)
    assert set(valid[:keep_last]).isdisjoint(gone)
    assert len(kept_valid) >= min(keep_last, len(valid))
    assert not [row for row in found if row.step in gone and needed(row, found, rules)]
    assert gone == [] or len(valid) >= keep_last
    assert set(gone) <= {row.step for row in found}
    assert gone == sorted(gone)


@given(found=ROWS, rules=RULES)
def test_everything_else_goes_once_there_are_enough(found, rules):
    gone = to_delete(found, **rules)

    older = valid_steps(found)[rules["keep_last"] :]
    for row in found:
        if row.step in older:
            assert needed(row, found, rules) or row.step in gone


@given(found=ROWS, rules=RULES)
def test_every_one_that_stays_has_a_reason_that_holds(found, rules):
    protect, awaited = rules.pop("protect"), rules.pop("awaited")
    kept = retention.why_kept(found, retention.Rules(**rules), protect, awaited)

    valid = valid_steps(found)
    for row in found:
        why = kept[row.step]
        assert (Why.NEWEST in why) == (row.step in valid[: rules["keep_last"]])
        assert (Why.LAST_VALID in why) == (valid == [row.step])
        assert (Why.BEST in why) == (row.step in best(found, rules))
        assert (Why.PINNED in why) == row.pinned
        assert (Why.IN_USE in why) == (row.step in protect)
        assert (Why.EVALUATION in why) == (row.step in awaited)
        assert (Why.TOO_FEW in why) == (len(valid) < rules["keep_last"])
        assert Why.NEWER not in why or not row.valid
    gone = to_delete(found, **rules, protect=protect, awaited=awaited)
    assert gone == sorted(s for s, w in kept.items() if not w)


@given(found=ROWS, rules=RULES)
def test_what_is_pruned_once_leaves_nothing_to_prune(found, rules):
    gone = to_delete(found, **rules)

    assert to_delete([row for row in found if row.step not in gone], **rules) == []


@given(found=ROWS, rules=RULES)
def test_without_a_metric_whether_an_older_one_is_valid_makes_no_difference(found, rules):
    rules["keep_best"] = 0
    counted = valid_steps(found)[: rules["keep_last"]]
    not_looked_at = [
        CheckpointRow(row.step, row.valid and row.step in counted, row.pinned, row.metrics)
        for row in found
    ]

    assert to_delete(found, **rules) == to_delete(not_looked_at, **rules)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"keep_last": 0}, "keep_last 0 is below 1"),
        ({"keep_last": -1}, "keep_last -1 is below 1"),
        ({"keep_last": 1, "keep_every": -1}, "keep_every -1 is below 0"),
        ({"keep_last": 1, "keep_best": -1}, "keep_best -1 is below 0"),
        ({"keep_last": 1, "keep_best": 1}, "keep_best 1 needs a best_metric"),
        ({"keep_last": 1, "best_is": "newest"}, "best_is 'newest' is neither"),
    ],
)
def test_a_rule_that_could_take_the_last_valid_one_or_means_nothing_is_refused(rule, said):
    with pytest.raises(ValueError, match=said):
        to_delete(rows(1000), **rule)


def test_pruning_deletes_what_need_not_be_kept(run, attempt):
    paths = support.save(run, attempt, 1000, 2000, 3000, 4000)

    gone = retention.prune(run, Rules(2), protect={1000}, attempt=attempt)

    assert gone == [2000]
    assert find.steps(run) == [4000, 3000, 1000]
    assert support.names_in(run) == [paths[i].name for i in (0, 2, 3)]


def test_pruning_counts_only_checkpoints_that_could_be_loaded(run, attempt):
    paths = support.save(run, attempt, 1000, 2000, 3000, 4000)
    (paths[3] / MANIFEST_NAME).unlink()
    os.truncate(paths[2] / support.SHARD_0, 1)

    assert retention.prune(run, Rules(2)) == []
    assert retention.prune(run, Rules(1)) == [1000]
    assert support.chosen(run) == 2000


def test_an_old_attempt_prunes_and_sweeps_nothing(run, attempt):
    support.save(run, attempt, 1000, 2000)
    staged, _ = support.stage(run, attempt, 3000)
    support.next_attempt(run)

    with pytest.raises(Fenced):
        retention.prune(run, Rules(1), attempt=attempt)
    with pytest.raises(Fenced):
        retention.sweep(run, attempt)
    assert find.steps(run) == [2000, 1000]
    assert staged.is_dir()


def test_dying_while_bytes_are_deleted_leaves_nothing_to_choose_and_the_rest_is_swept(
    run, attempt, monkeypatch
):
    support.save(run, attempt, 1000, 2000)

    def half(path):
        (path / support.SHARD_0).unlink()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(CheckpointError, match="gpt-a cannot be pruned"):
            retention.prune(run, Rules(1), attempt=attempt)

    assert find.steps(run) == [2000]
    assert find.choose(run).skipped == []
    assert retention.sweep(run, attempt) == ["step-0000001000.deleting-1"]
    assert support.names_in(run) == ["step-0000002000"]


def test_a_file_that_somebody_still_holds_open_waits_for_the_next_sweep(run, attempt, monkeypatch):
    support.save(run, attempt, 1000, 2000)

    def busy(path):
        raise OSError(39, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        assert retention.prune(run, Rules(1), attempt=attempt) == [1000]

    assert find.steps(run) == [2000]
    assert retention.sweep(run, attempt) == ["step-0000001000.deleting-1"]


def test_a_sweep_takes_what_older_attempts_left_and_nothing_else(run, attempt):
    (damaged,) = support.save(run, attempt, 500)
    (damaged / MANIFEST_NAME).unlink()
    support.save(run, attempt, 1000)
    support.stage(run, attempt, 2000)
    newer = support.next_attempt(run)
    mine, _ = support.stage(run, newer, 2000)
    foreign = run.checkpoints / "step-0000002000.staged-0001.bak"
    foreign.mkdir()

    swept = retention.sweep(run, newer)

    assert swept == ["step-0000002000.staged-0001"]
    assert support.names_in(run) == sorted(
        ["step-0000000500", "step-0000001000", mine.name, foreign.name]
    )


def test_a_sweep_of_a_run_without_checkpoints_finds_nothing(run, attempt):
    assert retention.sweep(run, attempt) == []


def test_pruning_a_linked_checkpoint_removes_the_link_only(run, attempt, tmp_path):
    path, _ = support.save(run, attempt, 1000, 2000)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)

    assert retention.prune(run, Rules(1)) == [1000]
    assert find.steps(run) == [2000]
    assert (elsewhere / MANIFEST_NAME).exists()


def test_the_manifest_goes_first_and_only_after_the_name(run, attempt, monkeypatch):
    support.save(run, attempt, 1000, 2000)
    seen = []

    def die(path):
        seen.append((path.name, sorted(file.name for file in path.iterdir())))
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)

    with pytest.raises(KeyboardInterrupt):
        retention.prune(run, Rules(1), attempt=attempt)

    assert seen == [("step-0000001000.deleting-1", sorted(support.SHARDS))]


def test_pruning_keeps_the_best_by_what_their_manifests_say(run, attempt):
    for step, loss in ((1000, 2.0), (2000, 1.0), (3000, math.nan), (4000, 3.0), (5000, 4.0)):
        staged, listed = support.stage(run, attempt, step)
        listed.metrics = {"loss": loss}
        commit.publish(run, staged, listed, attempt)
    rules = retention.Rules(1, keep_best=2, best_metric="loss")

    assert retention.prune(run, rules, attempt=attempt) == [3000, 4000]
    assert find.steps(run) == [5000, 2000, 1000]


def test_pruning_keeps_what_is_to_be_evaluated_and_the_best_of_what_was(run, attempt):
    support.save(run, attempt, *range(1000, 7000, 1000))
    judged = Evaluations(
        awaited=frozenset({3000}),
        metrics={1000: {"eval.loss": 2.0}, 2000: {"eval.loss": 1.0}, 4000: {}},
    )
    rules = retention.Rules(1, keep_best=1, best_metric="eval.loss")

    planned = retention.plan(run, rules, evaluations=judged)
    gone = retention.prune(run, rules, attempt=attempt, evaluations=judged)

    assert {one.row.step: one.why for one in planned if one.why} == {
        6000: (Why.NEWEST,), 3000: (Why.EVALUATION,), 2000: (Why.BEST,)
    }  # fmt: skip
    assert gone == [1000, 4000, 5000]
    assert find.steps(run) == [6000, 3000, 2000]


def test_pruning_leaves_a_pinned_one_and_takes_it_once_it_is_unpinned(run, attempt):
    support.save(run, attempt, 1000, 2000)
    retention.pin(run, 1000, "table 2")

    assert retention.prune(run, Rules(1), attempt=attempt) == []
    retention.unpin(run, 1000)
    assert retention.prune(run, Rules(1), attempt=attempt) == [1000]


def test_a_sweep_leaves_what_carries_a_pin(run, attempt):
    support.save(run, attempt, 1000)
    deleting = commit.rename_away(find.step_path(run, 1000), 1000, DELETING)
    staged, _ = support.stage(run, attempt, 2000)
    for path in (deleting, staged):
        (path / "PINNED").touch()

    assert retention.sweep(run, support.next_attempt(run)) == []
    assert support.names_in(run) == [deleting.name, staged.name]


def test_a_full_disk_can_be_pruned(small_disk):
    run = support.new_run(small_disk(1024**2))
    attempt = support.next_attempt(run)
    support.save(run, attempt, 1000, 2000)
    disks.fill(run.root)

    assert retention.prune(run, Rules(1), attempt=attempt) == [1000]
    assert support.names_in(run) == ["step-0000002000"]


def in_use(story, idle=None):
    return retention.in_use(RunHistory.read(story.run), idle)


def held(story, idle=None):
    """Which of five steps may be in use."""
    found = in_use(story, idle)
    return [step for step in (0, 1000, 2000, 3000, 4000) if found is not None and found.holds(step)]


def test_an_attempt_that_has_restored_nothing_yet_may_be_reading_any(run):
    story = Story(run.root).submitted().started(1).restored(1, 1000).ended(1, "crash", "requeue")
    story.started(2)

    assert held(story) == [0, 1000, 2000, 3000, 4000]
    assert in_use(story).reason == "attempt 2 is choosing which checkpoint to load"


def test_a_running_attempt_uses_what_it_restored_and_what_is_newer(run):
    story = Story(run.root).submitted().started(1).restored(1, 0).saved(1, 2000)
    story.ended(1, "node", "restart").started(2)
    story.restored(2, 1000).restored(2, 2000).saved(2, 3000)

    assert held(story) == [2000, 3000, 4000]
    assert "attempt 2" in in_use(story).reason
    assert "restored step 2000" in in_use(story).reason


@pytest.mark.parametrize(("reason", "following"), [("completed", "stop"), ("preempted", "requeue")])
def test_an_attempt_that_has_ended_uses_nothing(run, reason, following):
    story = Story(run.root).submitted().started(1).restored(1, 1000).ended(1, reason, following)

    assert in_use(story) is None


def test_a_run_that_never_began_uses_nothing(run):
    assert retention.in_use(RunHistory.read(run)) is None
    assert in_use(Story(run.root).submitted()) is None


def test_a_step_that_was_asked_for_stays_until_it_is_restored(run):
    story = Story(run.root).submitted().started(1).restored(1, 0).ended(1, "completed", "stop")
    story.submitted("18", "tok-2", from_step=2000)

    assert held(story) == [2000]
    assert "go on from step 2000" in in_use(story).reason
    story.started(2, "18").restored(2, 2000).ended(2, "preempted", "requeue")
    assert in_use(story) is None


def test_a_step_that_was_asked_for_in_vain_is_free_once_the_run_has_ended(run):
    story = Story(run.root).submitted(from_step=2000).started(1).ended(1, "crash", "stop")

    assert in_use(story) is None


def test_a_dead_attempt_without_an_end_uses_nothing_until_another_begins(run):
    story = Story(run.root).submitted().started(1).restored(1, 1000)
    idle = RunHistory.read(run).state

    assert held(story) == [1000, 2000, 3000, 4000]
    assert in_use(story, idle) is None
    story.started(2)
    assert held(story, idle) == [0, 1000, 2000, 3000, 4000]


def test_a_person_prunes_nothing_that_is_in_use_but_the_attempt_itself_does(run, attempt):
    support.save(run, attempt, 500, 1000, 2000, 3000)
    Story(run.root).submitted().started(1).restored(1, 1000)

    assert retention.prune(run, Rules(1)) == [500]
    assert retention.prune(run, Rules(1), attempt=attempt) == [1000, 2000]


def test_the_plan_is_what_a_person_would_prune_and_changes_nothing(run, attempt):
    support.save(run, attempt, 500, 1000, 2000, 3000)
    Story(run.root).submitted().started(1).restored(1, 2000)
    (find.step_path(run, 1000) / MANIFEST_NAME).unlink()

    planned = retention.plan(run, retention.Rules(1))

    assert [(one.row.step, one.row.valid, one.why) for one in planned] == [
        (3000, True, (Why.NEWEST, Why.IN_USE)),
        (2000, True, (Why.IN_USE,)),
        (1000, False, ()),
        (500, True, ()),
    ]
    assert planned[2].size_bytes == sum(support.SHARDS.values())
    assert find.steps(run) == [3000, 2000, 1000, 500]
    assert retention.prune(run, Rules(1)) == [500, 1000]


def test_those_that_a_person_names_go_torn_or_not(run, attempt):
    paths = support.save(run, attempt, 1000, 2000, 3000)
    (paths[1] / MANIFEST_NAME).unlink()

    assert retention.remove(run, [2000, 1000, 2000]) == [1000, 2000]
    assert support.names_in(run) == ["step-0000003000"]


def refused(run, steps, error, said, **options):
    """`remove` raises this, and every checkpoint is still there."""
    before = support.names_in(run)
    with pytest.raises(error, match=said) as caught:
        retention.remove(run, steps, **options)
    assert support.names_in(run) == before
    assert "\n" not in str(caught.value)


def test_where_one_is_refused_none_goes(run, attempt):
    support.save(run, attempt, 1000, 2000, 3000)
    retention.pin(run, 2000, "table 2")

    refused(run, [1000, 1500], NotFound, "no checkpoint of step 1500; there are: 3000, 2000, 1000")
    refused(run, [1000, 2000], ChecksFailed, r"step 2000 of gpt-a is pinned \(table 2\)")
    Story(run.root).submitted().started(1).restored(1, 3000)
    refused(run, [1000, 3000], RunAlive, "step 3000 of gpt-a was not deleted: attempt 1")


def test_the_last_valid_one_goes_only_by_force(run, attempt):
    (torn, *_) = support.save(run, attempt, 1000, 2000, 3000)
    (torn / MANIFEST_NAME).unlink()

    refused(run, [2000, 3000], ChecksFailed, "step 3000 is the last valid checkpoint of gpt-a")
    assert retention.remove(run, [2000, 3000], force=True) == [2000, 3000]
    assert retention.remove(run, [1000]) == [1000]


def test_force_takes_a_pinned_one_whole_so_that_the_next_sweep_finds_nothing(
    run, attempt, monkeypatch
):
    support.save(run, attempt, 1000, 2000)
    retention.pin(run, 1000)

    def busy(path):
        raise OSError(39, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        assert retention.remove(run, [1000], force=True) == [1000]

    assert retention.sweep(run, attempt) == ["step-0000001000.deleting-1"]
    assert support.names_in(run) == ["step-0000002000"]


def test_what_is_to_be_evaluated_goes_only_by_force(run, attempt):
    support.save(run, attempt, 1000, 2000, 3000)
    judged = Evaluations(frozenset({1000}))

    said = r"step 1000 of gpt-a is to be evaluated and was not deleted; wait until `hpctrain status"
    refused(run, [1000, 2000], ChecksFailed, said, evaluations=judged)
    assert retention.remove(run, [2000], evaluations=judged) == [2000]
    assert retention.remove(run, [1000], force=True, evaluations=judged) == [1000]


def test_force_takes_nothing_that_is_in_use(run, attempt):
    support.save(run, attempt, 1000, 2000)
    story = Story(run.root).submitted().started(1)
    idle = RunHistory.read(run).state

    refused(run, [1000], RunAlive, "attempt 1 is choosing which checkpoint to load", force=True)
    assert retention.remove(run, [1000], idle=idle) == [1000]
    story.started(2)
    refused(run, [2000], RunAlive, "attempt 2 is choosing", force=True, idle=idle)


def test_each_save_looks_at_the_files_of_one_checkpoint_and_before_it_takes_the_lock(
    run, attempt, monkeypatch
):
    """At 10,000 ranks a look is 10,000 calls, for which no save of another must wait."""
    looked, locked, known = [], [], {}
    real, real_lock = find.size_problems, retention.publishing

    @contextlib.contextmanager
    def publishing(*args):
        with real_lock(*args):
            locked.append(True)
            yield
            locked.clear()

    def size_problems(path, files, **how):
        looked.append((path.name, bool(locked)))
        return real(path, files, **how)

    monkeypatch.setattr(find, "size_problems", size_problems)
    monkeypatch.setattr(retention, "publishing", publishing)
    for step in range(1000, 8000, 1000):
        (path,) = support.save(run, attempt, step)
        looked.clear()
        retention.prune(run, Rules(2), attempt=attempt, rows_by_step=known)

        assert looked == [(path.name, False)]
    assert find.steps(run) == [7000, 6000]
    assert sorted(known) == [6000, 7000]
