"""Frameworks lose at a resume what docs/frameworks.md says; if one keeps more, correct the page."""

from __future__ import annotations

import contextlib
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import hpctrain
from tests.support import local_runs

STOP, STEPS = 3, 6
FACTORS = {  # what the input is multiplied by, for each situation
    "AdamW with a scheduler": lambda *_: 1,
    "dropout": lambda *_: 1,
    "numpy's generator in the training step": lambda *_: np.random.random(),  # noqa: NPY002
    "Python's `random` in the training step": lambda *_: random.random(),
    "numpy's generator in the data set": lambda *_: 1,
    "a `np.random.Generator` of the model": lambda model: model.rng.random(),
    "a counter in an attribute": lambda model: model.calls,
    "a buffer that is `None` until the first forward": lambda model: float(model.scale),
    "layers unfrozen by `add_param_group`": lambda *_: 1,
    "groups in another order, same shapes": lambda *_: 1,
    "shuffled samples, stop inside an epoch": lambda *_: 1,
}


class Drawn(list):
    def __getitem__(self, index):
        return {"x": super().__getitem__(index)["x"] * np.random.random()}  # noqa: NPY002


class Model(nn.Module):
    def __init__(self, situation, *, resumes):
        super().__init__()
        self.situation, self.rng, self.calls = situation, np.random.default_rng(7), 0
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("scale", None)
        self.one.requires_grad_("add_param_group" not in situation)
        used = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [{"params": [self.one.weight]}, {"params": [self.two.weight], "lr": 0.1}]
        if "another order" in situation:
            used = groups[::-1] if resumes else groups
        self.optimizer = torch.optim.AdamW(used, lr=0.01)
        self.scheduler, self.shuffles = StepLR(self.optimizer, 2, 0.5), "shuffled" in situation
        kind = Drawn if "data set" in situation else list
        self.data = kind({"x": x} for x in torch.randn(64, 8, generator=torch.Generator()))

    def forward(self, x):
        self.calls += 1
        if "None" in self.situation and self.scale is None:
            self.scale = x.std()
        if "add_param_group" in self.situation and self.calls == STOP:
            self.optimizer.add_param_group({"params": [*self.one.requires_grad_().parameters()]})
        hidden = self.two(self.one(x * FACTORS[self.situation](self)).relu()).relu()
        hidden = nn.functional.dropout(hidden) if self.situation == "dropout" else hidden
        return {"loss": (self.head(hidden).squeeze(1) - x.sum(1)).square().mean()}


def trainer(model, run, folder, resume):
    import transformers

    asked = {"max_steps": STEPS, "per_device_train_batch_size": 4, "use_cpu": True}
    asked["train_sampling_strategy"] = "random" if model.shuffles else "sequential"
    transformers.Trainer(
        model,
        transformers.TrainingArguments(folder, save_strategy="no", report_to="none", **asked),
        train_dataset=model.data,
        callbacks=[hpctrain.frameworks.huggingface.HuggingFaceCallback(run)],
        optimizers=(model.optimizer, model.scheduler),
    ).train(resume_from_checkpoint=resume)


def lightning(model, run, folder, resume):
    import lightning.pytorch as pl
    from torchdata.stateful_dataloader import StatefulDataLoader

    whole = pl.LightningModule()
    whole.model, whole.training_step = model, lambda batch: model(**batch)["loss"]
    every_step = {"scheduler": model.scheduler, "interval": "step"}
    whole.configure_optimizers = lambda: ([model.optimizer], [every_step])
    loader = DataLoader if model.shuffles else StatefulDataLoader
    asked = {
        "callbacks": [hpctrain.frameworks.lightning.LightningCallback(run)],
        "logger": False,
    }
    asked |= {"max_steps": STEPS, "enable_checkpointing": False, "accelerator": "cpu"}
    pl.Trainer(**asked, default_root_dir=folder).fit(
        whole, loader(model.data, 4, shuffle=model.shuffles), ckpt_path=resume
    )


def accelerate(model, run, folder, resume):
    from accelerate import Accelerator

    own = None if model.shuffles else torch.Generator()
    loader = DataLoader(model.data, 4, shuffle=model.shuffles, generator=own)
    accelerator, first = Accelerator(cpu=True), 1
    parts = accelerator.prepare(model, model.optimizer, model.scheduler, loader)
    model, optimizer, scheduler, loader = parts
    if resume is not None:
        accelerator.load_state(resume)
        loader, first = accelerator.skip_first_batches(loader, STOP), STOP + 1
    for done, batch in zip(range(first, STEPS + 1), loader, strict=False):
        accelerator.backward(model(**batch)["loss"])
        for do in (optimizer.step, scheduler.step, optimizer.zero_grad):
            do()
        run.at(done)
        if run.should_stop():
            run.sealed(done, accelerator.save_state(folder / str(done)))
            run.leave()


def train(framework, situation, folder, *, seed=3, stop=None, resume=None):
    run = SimpleNamespace(dir=None, step=-1, path=None, leave=sys.exit)
    run.world = SimpleNamespace(rank=0, world_size=1)
    run.at = lambda step, **_: vars(run).update(step=step)
    run.should_stop = lambda: run.step == stop
    run.sealed = lambda _, path: vars(run).update(path=path)
    for reseed in (random.seed, np.random.seed, torch.manual_seed):
        reseed(seed)
    model = Model(situation, resumes=resume is not None)
    with contextlib.suppress(SystemExit):
        framework(model, run, folder, resume)
    return list(model.state_dict().values()), run.path


@pytest.mark.timeout(600)  # each imports its framework
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("situation", FACTORS)
@pytest.mark.parametrize("framework", [trainer, lightning, accelerate])
def test_a_cell_of_the_table_is_what_the_framework_does(tmp_path, framework, situation):
    row = local_runs.FRAMEWORKS.read_text().split(f"\n| {situation} | ")[1]
    cell = row.split(" | ")[[trainer, lightning, accelerate].index(framework)]

    undisturbed, _ = train(framework, situation, tmp_path)
    _, sealed = train(framework, situation, tmp_path, stop=STOP)
    try:
        resumed, _ = train(framework, situation, tmp_path, seed=999, resume=sealed)
    except (RuntimeError, ValueError):
        assert cell.startswith("refused")
    else:
        same = len(resumed) == len(undisturbed) and all(map(torch.equal, resumed, undisturbed))
        assert (same, False) == (cell.startswith("to the bit"), cell.startswith("refused"))
