"""What an optimizer keeps beside its parameters' state goes on, and gradients of half an update."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict

import pytest
import torch
from torch import nn

from hpctrain.errors import CheckpointError
from tests.support.gloo import launch
from tests.support.resumed import resumed, start, undisturbed, values


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def loss_of(model, step):
    return model(torch.full((2, 2), (step + 1) / 5)).square().sum()


def program(make, *, facts=lambda _: None, change=lambda model: model, track=None):
    """A program with an optimizer that `make` builds of a model's parameters."""

    def run_it(run, total):
        model = change(net())
        optimizer = make(model)
        tracked = track(optimizer) if track is not None else {}
        run.track(model=model, optimizer=optimizer, **tracked)
        for step in run.steps(total):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)
            for one in tracked.values():
                getattr(one, "step", lambda: None)()
        return values(model), facts(optimizer)

    return run_it


def by_parameter(optimizer):
    """What the optimizer and those inside of it hold, in words that == compares."""
    inner = [vars(optimizer).get("base"), vars(optimizer).get("optimizer")]
    return [
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in s.items()
        }
        for one in (optimizer, *filter(None, inner))
        for key, s in one.state.items()
        if isinstance(key, torch.Tensor)
    ]


class Madgrad(torch.optim.Optimizer):
    """As facebookresearch/madgrad: a count of all steps under a key that is no parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        count = self.state.setdefault("k", torch.tensor([0]))
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad * 0.1 / (1 + count.item()))
        self.state["k"] += 1


class Sam(torch.optim.Optimizer):
    """As davda54/sam: an optimizer inside has the momentum, and the same groups."""

    def __init__(self, parameters, rate=0.05):
        super().__init__(parameters, {"lr": rate})
        self.base = torch.optim.AdamW(self.param_groups, lr=rate)
        self.param_groups = self.base.param_groups

    def step(self, closure):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["old"] = parameter.detach().clone()
                    parameter.add_(parameter.grad, alpha=0.05)
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(self.state[parameter]["old"])
        self.base.step()


class Lookahead(torch.optim.Optimizer):
    """As torch_optimizer's: it never calls torch's constructor, and its state_dict is its own."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.defaults, self.state = optimizer.defaults, defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure=None):
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] += 1
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if group["counter"] % 3 == 0:
                    slow.lerp_(parameter.detach(), 0.5)
                    parameter.data.copy_(slow)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad()

    def state_dict(self):
        fast = self.optimizer.state_dict()
        slow = dict(enumerate(self.state.values()))
        return {"slow": slow, "fast": fast["state"], "param_groups": fast["param_groups"]}

    def load_state_dict(self, state):
        raise AssertionError("all of it has come by the names of parameters")


class Calls(Lookahead):
    def step(self, closure=None):
        self.optimizer.step(closure)


class OddKeys(torch.optim.Optimizer):
    """State of a parameter under a number, a tuple and a word with a dot."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            for key in (0, ("a", 1), "block.0", "seen:int"):
                state.setdefault(key, torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.1 * sum(state.values()))


class TellsMore(torch.optim.SGD):
    """Has numbers, and one tensor for each parameter, that its own state_dict tells."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count, self.sums = 0, {}

    def step(self, closure=None):
        self.count += 1
        with torch.no_grad():
            every = [one for group in self.param_groups for one in group["params"]]
            for number, parameter in enumerate(every):
                total = self.sums.setdefault(number, torch.zeros_like(parameter))
                parameter.sub_(total.add_(parameter.grad), alpha=0.01 * self.count)
        super().step()

    def state_dict(self):
        return {**super().state_dict(), "count": self.count, "sums": self.sums}

    def load_state_dict(self, state):
        self.count, self.sums = state["count"], state["sums"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


def look_ahead(model):
    return Lookahead(torch.optim.AdamW(model.parameters(), lr=0.1))


KEEP = {
    "a key that is no parameter": lambda model: Madgrad(model.parameters()),
    "an optimizer inside": lambda model: Sam(model.parameters()),
    "an optimizer around another": look_ahead,
    "an optimizer around one that has another": lambda model: Calls(Sam(model.parameters())),
    "keys that are no words": lambda model: OddKeys(model.parameters()),
    "a state_dict with more": lambda model: TellsMore(model.parameters()),
}


@pytest.mark.parametrize("make", KEEP.values(), ids=KEEP)
def test_what_an_optimizer_keeps_by_itself_goes_on(tmp_path, make):
    run_it = program(make, facts=by_parameter)

    assert resumed(tmp_path, run_it, 2, 4, 7) == undisturbed(tmp_path, run_it, 7)


def test_groups_that_two_optimizers_share_stay_shared(tmp_path):
    """Else a scheduler would set the rate of groups that nobody steps by."""
    run_it = program(
        lambda model: Sam(model.parameters()),
        facts=lambda sam: (sam.base.param_groups is sam.param_groups, sam.param_groups[0]["lr"]),
        track=lambda sam: {"scheduler": torch.optim.lr_scheduler.StepLR(sam, 2, 0.5)},
    )

    end = resumed(tmp_path, run_it, 3, 7)

    assert end == undisturbed(tmp_path, run_it, 7)
    assert end[1] == (True, 0.05 * 0.125)


def test_an_inner_optimizer_goes_on_by_names_whatever_the_order_of_its_groups(tmp_path):
    def make(model, *, turned):
        groups = [{"params": [one]} for one in model.parameters()]
        return Sam(groups[::-1] if turned else groups)

    start(tmp_path / "run", program(lambda model: make(model, turned=False)), 3)
    end, _ = start(tmp_path / "run", program(lambda model: make(model, turned=True)), 6)

    assert end == undisturbed(tmp_path, program(lambda model: make(model, turned=False)), 6)[0]


def test_what_names_no_parameters_is_refused_in_another_order(tmp_path):
    def make(model, *, turned):
        groups = [{"params": [one]} for one in model.parameters()]
        return TellsMore(groups[::-1] if turned else groups)

    start(tmp_path, program(lambda model: make(model, turned=False)), 3)

    with pytest.raises(CheckpointError, match="has sums without the names of parameters"):
        start(tmp_path, program(lambda model: make(model, turned=True)), 6)


def test_an_optimizer_that_has_lost_the_one_inside_is_refused(tmp_path):
    start(tmp_path, program(lambda model: Lookahead(Madgrad(model.parameters()))), 3)
    plain = program(lambda model: Madgrad(model.parameters()))

    with pytest.raises(CheckpointError, match=r"only the checkpoint has an optimizer .*-changed"):
        start(tmp_path, plain, 4)
    start(tmp_path, plain, 4, resume__allow=("optimizer-changed",))


def test_moments_of_a_wider_type_are_not_rounded(tmp_path):
    """Torch's load_state_dict would make them of the parameter's type."""

    class Wide(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                wide = state.setdefault("wide", torch.zeros(parameter.shape).double())
                wide.add_(parameter.grad.double() / 3)
                parameter.data.sub_(wide.to(parameter.dtype), alpha=0.1)

    run_it = program(lambda model: Lookahead(Wide(model.parameters(), lr=0.1)), facts=by_parameter)

    assert resumed(tmp_path, run_it, 3, 6) == undisturbed(tmp_path, run_it, 6)


# ---- gradients


def accumulating(run, total):
    """Steps of the run are micro-batches, of which four make an update."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(total):
        loss_of(model, step).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return values(model), [one.grad is None or one.grad.tolist() for one in model.parameters()]


@pytest.mark.parametrize("stops", [(1,), (3, 6), (4,), (5, 7)])
def test_gradients_of_half_an_update_go_on(tmp_path, stops):
    assert resumed(tmp_path, accumulating, *stops, 9) == undisturbed(tmp_path, accumulating, 9)


def test_gradients_that_nobody_clears_go_on(tmp_path):
    def run_it(run, total):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(total):
            loss_of(model, step).backward()
            optimizer.step()
        return values(model)

    assert resumed(tmp_path, run_it, 2, 5, 7) == undisturbed(tmp_path, run_it, 7)


def looking_up(run, total):
    """Micro-batches of an embedding whose gradients are sparse; three make an update."""
    table = nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    run.track(model=table, optimizer=optimizer)
    for step in run.steps(total):
        table(torch.tensor([step % 6, 0, step % 2, 0])).square().sum().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return values(table)


@pytest.mark.parametrize("stops", [(1,), (2, 5), (3,)])
def test_sparse_gradients_of_half_an_update_go_on(tmp_path, stops):
    assert resumed(tmp_path, looking_up, *stops, 7) == undisturbed(tmp_path, looking_up, 7)


class CountsInPython(torch.optim.Adam):
    """A subclass of Adam whose own step counts by a number of Python's."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.sub_(parameter.grad, alpha=0.1 / state["step"])


def test_a_second_optimizer_keeps_numbers_of_which_torch_would_make_tensors(tmp_path):
    def run_it(run, total):
        model, second = net(), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        others = {"second": second, "optimizer2": CountsInPython(second.parameters())}
        run.track(model=model, optimizer=optimizer, **others)
        for step in run.steps(total):
            for one, by in ((model, optimizer), (second, others["optimizer2"])):
                by.zero_grad()
                loss_of(one, step).backward()
                by.step()
        return values(model, second)

    assert resumed(tmp_path, run_it, 2, 4) == undisturbed(tmp_path, run_it, 4)


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_an_update_has_used_are_not_saved(tmp_path, to_none):
    from hpctrain.checkpoint.store import find
    from hpctrain.ledger.run.layout import RunDir

    class Clears(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none=to_none)

    start(tmp_path / "plain", program(lambda model: Clears(model.parameters(), lr=1.0)), 3)
    start(tmp_path / "half", accumulating, 3)

    found = {
        name: [one.name for one in find.look(RunDir(tmp_path / name), 3).manifest.tensors]
        for name in ("plain", "half")
    }
    assert not [name for name in found["plain"] if "gradients" in name]
    assert len([name for name in found["half"] if "gradients" in name]) == 4


def accumulating_on_ranks(root, total, shards):
    """Each rank adds up its own; the weights at the end are all that is compared."""

    def run_it(run, total):
        model, wrapped = net(), None
        if shards:
            from torch.distributed.fsdp import fully_shard

            wrapped = fully_shard(model)
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        run.track(model=wrapped, optimizer=optimizer)
        for step in run.steps(total):
            updates = step % 3 == 2
            apart = contextlib.nullcontext if updates or shards else wrapped.no_sync
            with apart():
                wrapped(torch.full((2, 2), step / 5 + run.world.rank)).square().sum().backward()
            if updates:
                optimizer.step()
                optimizer.zero_grad()
        return [
            getattr(one, "full_tensor", lambda one=one: one)().tolist()
            for one in wrapped.parameters()
        ]

    whole = start(root / "whole", run_it, total)
    start(root / "stopped", run_it, 2)
    return start(root / "stopped", run_it, total) == whole


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_each_rank_keeps_its_own_gradients(tmp_path, shards):
    assert launch(accumulating_on_ranks, 2, root=tmp_path, total=6, shards=shards) == [True] * 2


def test_gradients_are_dropped_and_named_at_another_number_of_ranks(tmp_path, caplog):
    launch(accumulate_two, 2, root=tmp_path)

    start(tmp_path, accumulating, 4)

    assert any("each rank's own, and are dropped" in line for line in caplog.messages)


def accumulate_two(root):
    start(root, accumulating, 2)


# ---- refused


def split_over_ranks(root):
    warnings.simplefilter("ignore")  # of its import
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def run_it(run, total):
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(total):
            raise AssertionError(f"began step {step}")

    try:
        start(root, run_it, 1)
    except CheckpointError as error:
        return str(error)
    return ""


def test_an_optimizer_that_is_split_over_ranks_is_refused_before_the_first_step(tmp_path):
    for said in launch(split_over_ranks, 2, root=tmp_path):
        assert "keeps on each rank the state of other parameters" in said
        assert "engine.kind=fsdp2" in said
