"""What influences training and is in no checkpoint is named, and what is saved or idle is not."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME
from hpctrain.checkpoint.store import find
from hpctrain.ledger.run.layout import RunDir
from hpctrain.train.runtime import unsaved
from tests.support.gloo import launch
from tests.support.resumed import start, values


class Net(nn.Module):
    """A model with what people keep in attributes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.temperature = 1.0
        self.momentum = 0.9
        self.calls = torch.zeros((), dtype=torch.long)
        self.means = np.zeros(5)
        self.shift = [0.0, 0.0]
        self.cache = None
        self.last = None
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x):
        self.cache = self.table * 2 if self.cache is None else self.cache
        self.last = x * 1.5
        return self.layer(x)


def program(*changes, **more):
    """A program whose model is changed in each step, and which tracks `more`, made from both."""

    def run_it(run, total):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        others = {name: make(model, optimizer) for name, make in more.items()}
        kept = {name: thing for name, thing in others.items() if name[0] != "_"}
        run.track(model=model, optimizer=optimizer, **kept)
        for step in run.steps(total):
            model(torch.full((2, 3), step / 10)).sum().backward()
            optimizer.step()
            model.kept += 1
            for thing in others.values():
                if hasattr(thing, "update_parameters"):
                    thing.update_parameters(model)
                elif hasattr(thing, "step"):
                    thing.step()
            model.zero_grad()
            for change in changes:
                change(model)
        return values(model)

    return run_it


def hotter(model):
    model.temperature *= 0.5


def counted(model):
    model.calls += 1
    model.means[3] += 1
    model.shift[1] += 0.25


def seen(model):
    model.seen += 1


@pytest.fixture
def said(tmp_path, caplog):
    """Run a program up to each of the steps, and return what each start says of unsaved state."""

    def run(run_it, *stops):
        lines = []
        for total in stops:
            caplog.clear()
            with caplog.at_level(logging.WARNING, "hpctrain.runtime"):
                start(tmp_path / "run", run_it, total)
            lines.append([one for one in caplog.messages if "track" in one])
        return lines

    return run


def test_an_attribute_that_had_changed_and_begins_again_is_named_with_both_values(said):
    first, [line] = said(program(hotter), 3, 6)

    assert first == []
    assert line == (
        "not in the checkpoint: model.temperature was 0.125 and began again at 1.0. If training "
        "depends on it, make it a persistent buffer, or give it to run.track"
    )


def test_tensors_arrays_lists_and_buffers_that_are_not_persistent_are_looked_at_too(said):
    _, [line] = said(program(counted, seen, hotter), 3, 6)

    assert "model.temperature was 0.125" in line
    assert "model.calls was 3 and began again at 0" in line
    assert "model.means (float64[5]) had changed and began again" in line
    assert line.partition(". If")[0].endswith("; and 2 more")


class Noisy(nn.Module):
    """Draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.of_torch, self.of_numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.of_python, self.unused = random.Random(3), np.random.default_rng(4)

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.of_torch) * self.of_numpy.random()
        return self.layer(x + noise * self.of_python.random())


def noisy(*tracked):
    def run_it(run, total):
        model = Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer, **{n: getattr(model, n) for n in tracked})
        for _ in run.steps(total):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    return run_it


def test_generators_of_a_module_are_named_unless_they_are_tracked(said):
    first, [line] = said(noisy("of_python"), 3, 6)

    assert first == []
    assert "model.of_torch (Generator) had changed and began again" in line
    assert "model.of_numpy (Generator) had changed and began again" in line
    assert "of_python" not in line
    assert "unused" not in line


@pytest.mark.parametrize(
    ("program_says", "is_named"), [("at step 2", True), ("by the step", False)]
)
def test_what_is_frozen_and_begins_trainable_again_is_named(said, program_says, is_named):
    def run_it(run, total):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(total):
            if step == 2 or (step > 2 and program_says == "by the step"):
                model.weight.requires_grad_(requires_grad=False)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    _, lines = said(run_it, 4, 6)

    named = "model.weight.requires_grad was False and began again at True"
    assert any(named in line for line in lines) == is_named


def under_ddp(root, total):
    """What one rank says of a model under DDP, whose attributes change with its first batches."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    unsaved.log.addHandler(handler)

    def run_it(run, total):
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(total):
            with model.no_sync() if step % 2 else contextlib.nullcontext():
                model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    start(root, run_it, total)
    start(root, run_it, total + 3)
    return lines


def test_attributes_of_a_wrapper_are_not_named(tmp_path):
    assert launch(under_ddp, 1, root=tmp_path, total=4) == [[]]


def test_it_is_named_at_every_start_that_begins_it_anew(said):
    lines = said(program(hotter), 3, 6, 9)

    assert [len(each) for each in lines] == [0, 1, 1]
    assert "model.temperature was 0.125 and began again at 1.0" in lines[2][0]


def test_what_the_program_computes_from_its_step_is_not_named(said):
    def restores(model):
        model.temperature = 0.5 ** float(model.kept[0])

    assert said(program(restores), 3, 6) == [[], []]


def test_an_average_of_batches_that_begins_anew_is_named_though_the_batches_differ(said):
    def averages(model):
        model.seen.lerp_(model.last.mean().expand(4) + 3, 0.1)

    _, [line] = said(program(averages), 5, 9)

    assert "model.seen (float32[4]) had changed and began again" in line


def test_numbers_of_the_last_batch_are_not_named(said):
    def keeps(model):
        model.temperature = model.last.mean().item() + 3
        model.shift = [model.temperature, 0.0]

    assert said(program(keeps), 5, 9) == [[], []]


def test_what_the_first_step_sets_for_good_is_not_named(said):
    def sets(model):
        model.temperature = 2.0

    assert said(program(sets), 3, 6) == [[], []]


def test_what_the_program_restores_itself_is_not_named(said):
    kept = {}

    def counts(model):
        model.momentum = (model.momentum + 1) % 4  # and so it is 0 again after the restored step
        kept["momentum"] = model.momentum

    class Restoring(Net):
        def __init__(self):
            super().__init__()
            self.momentum = kept.get("momentum", 0)

    def run_it(run, total):
        model = Restoring()
        run.track(model=model)
        for _ in run.steps(total):
            counts(model)

    assert said(run_it, 3, 6) == [[], []]


def test_a_manifest_has_what_had_changed_by_a_late_step(said, tmp_path):
    start(tmp_path / "run", program(counted), 9, checkpoint__interval_steps=1)

    changed = find.look(RunDir(tmp_path / "run"), 9).manifest.extra[unsaved.NAME]
    assert [one["text"] for one in changed["model.calls"]] == ["0", "1", "8"]


def test_results_that_lead_to_gradients_are_no_state(said, tmp_path):
    def keeps(model):
        model.means = model.layer.weight.sum() * 2

    said(program(keeps, hotter), 3)

    changed = find.look(RunDir(tmp_path / "run"), 3).manifest.extra[unsaved.NAME]
    assert list(changed) == ["model.temperature"]


def test_caches_last_results_and_what_is_saved_are_not_named(said):
    assert said(program(), 3, 6) == [[], []]


def test_nothing_is_written_where_nothing_is_unsaved(said, tmp_path):
    said(program(), 3)
    said(program(hotter), 4)

    root = RunDir(tmp_path / "run")
    assert unsaved.NAME not in find.look(root, 3).manifest.extra
    assert list(find.look(root, 4).manifest.extra[unsaved.NAME]) == ["model.temperature"]


UNTRACKED = {
    "CosineAnnealingLR": (lambda _, optimizer: CosineAnnealingLR(optimizer, 10), "scheduler"),
    "SGD": (
        lambda model, _: torch.optim.SGD([model.layer.bias], lr=0.01, momentum=0.9),
        "optimizer2",
    ),
    "AveragedModel": (lambda model, _: AveragedModel(copy.deepcopy(model)), "ema"),
}


@pytest.mark.parametrize("kind", UNTRACKED)
def test_an_object_that_is_not_tracked_is_named_at_the_first_start_and_as_it_begins_anew(
    said, kind
):
    make, name = UNTRACKED[kind]

    [first], [second] = said(program(_other=make), 3, 6)

    assert first == (
        f"{kind} is not tracked, so no checkpoint has it and a resumed run begins it anew: "
        f"run.track({name}=...)"
    )
    assert second == (
        f"{kind} is not tracked and has begun anew at step 3, as no checkpoint has it: "
        f"run.track({name}=...)"
    )


@pytest.mark.parametrize("kind", UNTRACKED)
def test_the_same_object_is_not_named_when_it_is_tracked(said, kind):
    make, _ = UNTRACKED[kind]

    assert said(program(other=make), 3, 6) == [[], []]


def test_schedulers_inside_of_a_tracked_one_are_tracked(said):
    def combined(_, optimizer):
        parts = [StepLR(optimizer, 2), CosineAnnealingLR(optimizer, 10)]
        return SequentialLR(optimizer, parts, milestones=[2])

    assert said(program(scheduler=combined), 3, 6) == [[], []]


def test_a_scaler_that_is_not_tracked_is_named(said):
    [[line]] = said(program(_held=lambda *_: [torch.amp.GradScaler("cpu")]), 3)

    assert line.startswith("GradScaler is not tracked")
    assert line.endswith("run.track(scaler=...)")


IDLE = {
    "SGD": lambda *_: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9),
    "AveragedModel": lambda *_: AveragedModel(nn.Linear(2, 2)),
    "GradScaler": lambda *_: torch.amp.GradScaler("cpu", enabled=False),
}


@pytest.mark.parametrize("kind", IDLE)
def test_what_is_never_stepped_or_updated_takes_no_part(said, kind):
    held = []

    def hold(*others):
        held.append(IDLE[kind](*others))
        return held

    assert said(program(_held=hold), 3, 6) == [[], []]
    assert [type(one).__name__ for one in held] == [kind, kind]


def test_a_program_that_saves_by_itself_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(unsaved, "_alive", lambda: pytest.fail("looked for objects"))
    nobody = unsaved.Unsaved(None)

    nobody.begin(None, 0)
    nobody.after_first_step()

    assert nobody.recorded_at(5) == {}


@pytest.mark.parametrize(
    "strange",
    [
        *(float("nan"), float("inf"), 10**400, np.float32("nan"), {}),
        torch.tensor([float("inf"), 1.0]),
        *(torch.zeros(shape, dtype=torch.uint8).view(torch.int4) for shape in ((1,), (3,))),
    ],
    ids=["nan", "inf", "large", "numpy", "dict", "tensor", "half a byte", "half bytes"],
)
def test_strange_values_neither_end_training_nor_spoil_a_manifest(said, tmp_path, strange):
    def changes(model):
        model.temperature = strange if type(model.temperature) is float else 0.5

    assert said(program(changes), 3, 6)[0] == []
    manifest = find.look(RunDir(tmp_path / "run"), 3).path / MANIFEST_NAME
    json.loads(manifest.read_text(), parse_constant=pytest.fail)


def test_of_thousands_of_counters_a_manifest_has_a_hundred(said, tmp_path):
    def counts(model):
        for name in names:
            setattr(model, name, getattr(model, name, 0) + 1)

    names = [f"calls_{number}" for number in range(1000)]

    def run_it(run, total):
        model = Net()
        counts(model)
        run.track(model=model)
        for _ in run.steps(total):
            counts(model)

    _, [line] = said(run_it, 3, 6)

    manifest = find.look(RunDir(tmp_path / "run"), 3).manifest
    assert len(manifest.extra[unsaved.NAME]) == unsaved.MOST
    assert "; and 97 more. If" in line
