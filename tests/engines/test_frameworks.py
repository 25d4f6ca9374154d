"""Training loops of other libraries, as docs/frameworks.md shows them, through a preemption.

Each program runs on real ranks with its real library, is preempted in the middle of its steps, and
comes back by itself.
"""

from __future__ import annotations

import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hpctrain
from hpctrain.errors import CheckpointError
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.progress import progress
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.layout import RunDir
from tests.support import local_runs
from tests.support.sampling import some

if TYPE_CHECKING:
    from torch import Tensor

RANKS, STEPS, PREEMPTED_AT, NEVER = 2, 100, 7, 10**6
TRAINER = "Hugging Face Trainer"
FINAL = {
    TRAINER: "final/model.safetensors",
    "Lightning": "final.ckpt",
    "Accelerate": "final.pt",
    "DeepSpeed": "final/final/mp_rank_00_model_states.pt",
}


def train(folder: Path, framework: str, preempted_at: int) -> RunHistory:
    """Two ranks of the program to their end."""
    folder.mkdir()
    (folder / "train.py").write_text(local_runs.shown(framework))
    script = [str(local_runs.SCRIPTS / "preempted.py"), str(preempted_at), "train.py"]
    words = ["--env", "ACCELERATE_USE_CPU=true", "--", *script]
    run = local_runs.start(folder, "r", 1, RANKS, *words)
    attempts = 1 if preempted_at == NEVER else 2
    # DeepSpeed's import takes minutes where other tests leave it little of the CPUs.
    end = local_runs.await_end(run, attempts)
    assert end["reason"] == "completed"
    return RunHistory.read(RunDir(run))


def weights(folder: Path, framework: str) -> list[Tensor]:
    """What the program had at its end."""
    path = folder / FINAL[framework]
    if path.suffix == ".safetensors":
        state = load_file(path)
    else:
        state = torch.load(path, weights_only=False)
        state = state.get("state_dict") or state.get("module") or state
    return [state[name] for name in sorted(state)]


def in_plain_torch(epoch: int) -> list[Tensor]:
    """What all but the Trainer's program train, without a framework, ranks or a preemption.

    Args:
        epoch: Steps until the data begin again.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for rank in range(RANKS):
            seed = step % epoch * RANKS + rank
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            ((model(x).squeeze(1) - x.sum(1)).square().mean() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model.bias.detach(), model.weight.detach()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", some(list(FINAL), 1))  # each imports its framework
def test_the_program_that_is_shown_loses_no_step_to_a_preemption(tmp_path, framework):
    history = train(tmp_path / "preempted", framework, PREEMPTED_AT)

    first, second = attempts(history)
    assert (first.reason, first.stop_cause) == ("preempted", "sigterm")
    assert PREEMPTED_AT <= first.last_step < STEPS
    assert (second.first_step, second.last_step) == (first.last_step, STEPS)
    assert (first.steps_lost, second.steps_lost) == (0, 0)
    done = (tmp_path / "preempted" / "steps.txt").read_text().split()
    assert len(done) == STEPS, "the optimizer's own count, over both starts"
    # With steps of a millisecond a stop holds up to 50 of them later (control.lease.AHEAD).
    saved = sorted({first.last_step, 40, 80, STEPS})
    assert [(save.kind, save.step) for save in history.saves] == [
        ("sealed", step) for step in saved[: len(history.saves)]
    ]
    # A stop held up to step 40 or 80 is the save there, and not all programs save their last step.
    assert len(history.saves) >= len(saved) - 1
    assert progress(history).loss is not None
    marks = [mark.fact for attempt in history.attempts for mark in attempt.marks]
    tokens = (4 if framework == TRAINER else 8) * 4 * RANKS
    assert sum(mark.tokens for mark in marks) == STEPS * tokens
    if framework == TRAINER:
        train(tmp_path / "peace", framework, NEVER)
        expected = weights(tmp_path / "peace", framework)
    else:
        expected = in_plain_torch(64 if framework == "Lightning" else STEPS)
    assert all(map(torch.equal, weights(tmp_path / "preempted", framework), expected))


class ToldRun:
    """Notes what a callback says to its run; a stop is agreed at step 2."""

    def __init__(self):
        self.world = SimpleNamespace(rank=0, world_size=1)
        self.step, self.said, self.dir = 0, [], None

    def at(self, step, **values):
        self.step = step
        self.said.append((step, values))

    def should_stop(self):
        return self.step == 2

    def sealed(self, step, path):
        self.said.append(("sealed", step, path.name))

    def leave(self):
        self.said.append("left")


def test_a_trainer_that_stops_saves_and_neither_evaluates_nor_deletes_its_last_checkpoint():
    """With save_total_limit=1 the Trainer deletes at its end what is not the best."""
    from transformers import TrainerControl, TrainerState

    run = ToldRun()
    callback = hpctrain.frameworks.huggingface.HuggingFaceCallback(run)
    asked = SimpleNamespace(world_size=1, output_dir="out")
    state, control = TrainerState(max_steps=80), TrainerControl()
    state.best_model_checkpoint = "out/checkpoint-1"
    callback.on_log(asked, state, control, logs={"eval_loss": 2.0})  # an evaluation before training
    callback.on_train_begin(asked, state, control)
    for step in (1, 2):
        state.global_step = step
        control.should_evaluate = True
        callback.on_step_end(asked, state, control)
        callback.on_log(asked, state, control, logs={"step": step, "total": 7, "loss": 0.5})
        assert control.should_training_stop == control.should_save == (step == 2)
        assert control.should_evaluate == (step == 1)
    callback.on_save(asked, state, control)
    control.should_evaluate = control.should_save = True  # as at the end of an epoch
    callback.on_epoch_end(asked, state, control)
    assert not control.should_evaluate
    assert not control.should_save
    assert state.best_model_checkpoint is None
    callback.on_train_end(asked, state, control)
    begun = (0, {"total": 80})
    steps = [(1, {}), (1, {"loss": 0.5}), (2, {}), (2, {"loss": 0.5})]
    assert run.said == [begun, *steps, ("sealed", 2, "checkpoint-2"), "left"]


def test_lightnings_handler_of_sigterm_is_put_aside_and_gathered_gradients_are_no_step():
    before = signal.getsignal(signal.SIGTERM)
    run = ToldRun()
    run.step = -1
    try:
        callback = hpctrain.frameworks.lightning.LightningCallback(run)
        signal.signal(signal.SIGTERM, lambda *_: None)
        trainer = SimpleNamespace(world_size=1, global_step=0, log_every_n_steps=1)
        trainer.estimated_stepping_batches = 80.0
        callback.on_train_start(trainer, SimpleNamespace(automatic_optimization=True))
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
    callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(2.0)})
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(1.0)})
    assert run.said == [(0, {"total": 80}), (1, {"loss": 1.0})]


def test_lightning_keeps_so_many_checkpoints_over_all_starts_and_steps_over_no_save(tmp_path):
    """Two optimizers count two steps for a batch."""
    run = ToldRun()
    run.should_stop = lambda: False
    run.dir = SimpleNamespace(root=tmp_path)
    output = tmp_path / "output"
    output.mkdir()
    for step in (10, 20, 70):  # the last is damaged, and the run resumes from 20
        (output / f"step-{step:010d}.ckpt").touch()
    trainer = SimpleNamespace(global_step=21, log_every_n_steps=100, save_checkpoint=Path.touch)
    trainer.strategy = SimpleNamespace(remove_checkpoint=Path.unlink)
    run.step = 21
    callback = hpctrain.frameworks.lightning.LightningCallback(run, every_n_steps=10, keep=2)
    left = {}
    for step in range(23, 53, 2):
        trainer.global_step = step
        if step == 41:
            run.sealed = refuse
        callback.on_train_batch_end(trainer, None, {})
        left[step] = sorted(int(path.stem[5:]) for path in output.iterdir())
    assert left[29] == [10, 20, 70]
    assert left[31] == [20, 31, 70]
    assert left[51] == [20, 31, 41, 51, 70], "those that the run can resume from stay"


def refuse(_step, _path):
    raise CheckpointError("no room")


@pytest.mark.parametrize(("batches", "automatic"), [(math.inf, True), (80, False)])
def test_lightning_s_own_count_is_no_total_where_it_has_none_or_steps_are_not_its(
    batches, automatic
):
    run = ToldRun()
    callback = hpctrain.frameworks.lightning.LightningCallback(run)
    trainer = SimpleNamespace(world_size=1, global_step=0, estimated_stepping_batches=batches)
    before = signal.getsignal(signal.SIGTERM)
    try:
        callback.on_train_start(trainer, SimpleNamespace(automatic_optimization=automatic))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert run.said == [(0, {"total": None})]


def test_lightning_takes_the_ranks_that_this_start_has(monkeypatch):
    run = SimpleNamespace(world=SimpleNamespace(world_size=6, ranks_per_node=2))
    where = hpctrain.frameworks.lightning.where
    monkeypatch.delenv("RANK", raising=False)
    assert where(run) == {}
    monkeypatch.setenv("RANK", "0")
    told = where(run)
    assert (told["devices"], told["num_nodes"]) == (2, 3)
    assert [type(plugin).__name__ for plugin in told["plugins"]] == ["TorchElasticEnvironment"]
