"""Optimizers, schedulers and models of torch and of packages, each made small and anew."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import lion_pytorch
import prodigyopt
import schedulefree
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

from tests.support.resumes import Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

RATE = 0.01


def _made(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters(), **{"lr": RATE, **options})


def _flags(name: str, kind: Any, *flags: str, **options: Any) -> dict[str, Any]:
    """An optimizer as it is by default, and with each of some flags."""
    made = {name: _made(kind, **options)}
    made |= {f"{name} {flag}": _made(kind, **options, **{flag: True}) for flag in flags}
    return made


OPTIM = torch.optim
EACH = ("foreach", "maximize")
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    **_flags("Adadelta", OPTIM.Adadelta, *EACH, weight_decay=0.1),
    **_flags("Adafactor", OPTIM.Adafactor, *EACH),
    **_flags("Adagrad", OPTIM.Adagrad, *EACH, "fused", lr_decay=0.1, initial_accumulator_value=0.1),
    **_flags("Adam", OPTIM.Adam, *EACH, "fused", "amsgrad", "decoupled_weight_decay"),
    **_flags("AdamW", OPTIM.AdamW, *EACH, "fused", "amsgrad"),
    "AdamW fused amsgrad": _made(OPTIM.AdamW, fused=True, amsgrad=True),
    "AdamW rate in a tensor": lambda model: OPTIM.AdamW(
        model.parameters(), lr=torch.tensor(RATE), fused=True
    ),
    **_flags("Adamax", OPTIM.Adamax, *EACH),
    **_flags("ASGD", OPTIM.ASGD, *EACH, t0=2),
    **_flags("LBFGS", OPTIM.LBFGS, max_iter=3, history_size=2),
    "LBFGS strong_wolfe": _made(OPTIM.LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": _made(OPTIM.Muon, nesterov=True),
    **_flags("NAdam", OPTIM.NAdam, *EACH, "decoupled_weight_decay"),
    **_flags("RAdam", OPTIM.RAdam, *EACH, "decoupled_weight_decay"),
    **_flags("RMSprop", OPTIM.RMSprop, *EACH, "centered", momentum=0.9),
    **_flags("Rprop", OPTIM.Rprop, *EACH),
    **_flags("SGD", OPTIM.SGD, *EACH, "fused", "nesterov", momentum=0.9),
    "SGD without momentum": _made(OPTIM.SGD),
    "SparseAdam": _made(OPTIM.SparseAdam),
    "Lion": _made(lion_pytorch.Lion),
    "Prodigy": _made(prodigyopt.Prodigy, lr=1.0, decouple=True, safeguard_warmup=True),
    "AdamWScheduleFree": _made(schedulefree.AdamWScheduleFree, warmup_steps=3),
    "RAdamScheduleFree": _made(schedulefree.RAdamScheduleFree),
    "SGDScheduleFree": _made(schedulefree.SGDScheduleFree, warmup_steps=3),
    "transformers' Adafactor": _made(
        transformers.optimization.Adafactor, scale_parameter=False, relative_step=False
    ),
    "transformers' Adafactor, relative": _made(
        transformers.optimization.Adafactor, lr=None, warmup_init=True
    ),
}
"""Capturable ones need an accelerator, and torch refuses differentiable ones on leaf parameters."""
RATELESS = ("transformers' Adafactor, relative",)
"""Optimizers whose rate no scheduler sets."""


def _cosine(o: Optimizer) -> Any:
    return lr.CosineAnnealingLR(o, 9)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr.StepLR(o, 2),
    "milestones": lambda o: lr.MultiStepLR(o, [2, 5, 5]),
    "constant": lambda o: lr.ConstantLR(o, total_iters=4),
    "linear": lambda o: lr.LinearLR(o, 0.1, total_iters=5),
    "exponential": lambda o: lr.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr.PolynomialLR(o, 9, 2.0),
    "cosine": _cosine,
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2, 2),
    "cyclic": lambda o: lr.CyclicLR(o, 0.001, 0.1, 2, cycle_momentum=False),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "own function": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "factors": lambda o: lr.MultiplicativeLR(o, lambda _: 0.9),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=math.inf),
    "average": lambda o: SWALR(o, 0.001, anneal_epochs=4),
    "in sequence": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, total_iters=3), lr.MultiStepLR(o, [1, 2]), _cosine(o)], [3, 6]
    ),
    "chained": lambda o: lr.ChainedScheduler(
        [lr.MultiStepLR(o, [2, 4]), lr.ConstantLR(o, total_iters=3), lr.ExponentialLR(o, 0.95)]
    ),
}


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x.abs().sum(1) * 10).long() % 6)


def model_for(optimizer: str) -> nn.Module:
    """A model whose parameters this optimizer takes."""
    if optimizer == "SparseAdam":
        return Sparse()
    bias = optimizer != "Muon"
    return nn.Sequential(nn.Linear(2, 3, bias=bias), nn.Tanh(), nn.Linear(3, 2, bias=bias))


def training(model: nn.Module, optimizer: Any, schedule: Any = None, **tracked: Any) -> Training:
    """The usual step, with a closure where the optimizer calls it more than once."""

    def step(_: int) -> None:
        x = torch.randn(4, 2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).abs().square().sum()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        if isinstance(schedule, lr.ReduceLROnPlateau):
            schedule.step(loss.detach())
        elif schedule is not None:
            schedule.step()

    if hasattr(optimizer, "train"):
        optimizer.train()
    if schedule is not None:
        tracked["schedule"] = schedule
    return Training(model, optimizer, step, tracked)


# ---- models


def _norms() -> nn.Module:
    statistics = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    spread = [nn.Unflatten(1, (2, 2)), statistics, nn.BatchNorm1d(2, momentum=None)]
    first = [nn.Linear(2, 4), nn.BatchNorm1d(4), *spread, nn.GroupNorm(2, 2), nn.Flatten()]
    return nn.Sequential(*first, nn.LayerNorm(4), nn.RMSNorm(4))


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


def _lazy_met() -> nn.Module:
    model = _lazy()
    model(torch.randn(4, 2))
    return model


def _weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 3)), nn.Linear(3, 2))


def _spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(2, 3)), nn.Linear(3, 2))


def _orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(2, 2)), nn.Linear(2, 2))


def _old_norms() -> nn.Module:
    return nn.Sequential(
        torch.nn.utils.spectral_norm(nn.Linear(2, 3)), torch.nn.utils.spectral_norm(nn.Linear(3, 2))
    )


class Complex(nn.Module):
    """Complex parameters of both widths."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.register_buffer(
            "turn", torch.polar(torch.ones(3).double(), torch.arange(3.0).double())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight) * self.wide * self.turn


def _pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    prune.random_unstructured(model[0], "weight", 0.5)
    prune.l1_unstructured(model[1], "bias", 1)
    return model


class Heads(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if tied:
            self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x).tanh())


def _adapters() -> nn.Module:
    import peft

    base = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))


class Unused(nn.Module):
    """A layer that never takes part, one that is frozen, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(2, 2) for _ in range(3))
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.scale is None:
            self.scale = x.std().detach()
        return self.frozen(self.used(x)) * self.scale


class Wide(nn.Module):
    """From 16 to 64 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norms": _norms,
    "lazy, met no batch": _lazy,
    "lazy, met a batch": _lazy_met,
    "weight norm": _weight_norm,
    "spectral norm": _spectral_norm,
    "orthogonal": _orthogonal,
    "spectral norm, old": _old_norms,
    "complex": Complex,
    "pruned": _pruned,
    "tied": lambda: Heads(tied=True),
    "untied": lambda: Heads(tied=False),
    "adapters": _adapters,
    "unused and frozen": Unused,
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)),
    "dropout": lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
    "double": lambda: nn.Sequential(Wide(), nn.Linear(2, 2).double()),
}


def grown() -> Training:
    """A layer that the optimizer gets within the loop, with a rate of its own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=RATE)
    made = training(model, optimizer)
    train = made.step

    def step(number: int) -> None:
        if number >= GROWS_AT and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 5 * RATE})
        train(number)

    made.step = step
    return made


GROWS_AT = 3
