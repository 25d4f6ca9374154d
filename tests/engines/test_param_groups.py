"""An optimizer's groups: what the optimizer changes goes on, what a person sets counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hpctrain.errors import CheckpointError
from hpctrain.node.agent.end_writer import read_outcome
from tests.support.resumed import resumed, start, undisturbed, values
from tests.support.value_trees import facts

pytestmark = pytest.mark.quick


class Counting(torch.optim.SGD):
    """Keeps running numbers in its groups, as FusedAdam, Prodigy and schedule-free do."""

    def __init__(self, params, lr=0.1, growth=1.5):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("d", 1e-3)
            group["growth"] = growth
        self.defaults["d"] = 1e-3

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["d"] *= group["growth"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] * group["d"])


def trained(run, total, model, optimizer, *, scheduler=None, change=None):
    tracked = {"scheduler": scheduler} if scheduler is not None else {}
    run.track(model=model, optimizer=optimizer, **tracked)
    for step in run.steps(total):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).pow(2).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if change is not None:
            change(step)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return values(model), groups


def counting(run, total, **options):
    model = nn.Linear(2, 1)
    return trained(run, total, model, Counting(model.parameters(), **options))


def test_numbers_that_the_optimizer_keeps_in_its_groups_go_on(tmp_path):
    end = resumed(tmp_path, counting, 2, 3, 5)

    assert end == undisturbed(tmp_path, counting, 5)
    assert end[1][0]["k"] == 5


def by_epochs(run, total):
    """A loop over steps for each epoch of two; the program sets the rate by itself."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for end in range(2, 8, 2):
        for _ in run.steps(min(end, total)):
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return facts(model.weight), optimizer.param_groups[0]["lr"]


def test_a_program_may_have_a_loop_for_each_epoch(tmp_path):
    assert resumed(tmp_path, by_epochs, 3, 6) == undisturbed(tmp_path, by_epochs, 6)


def test_a_run_whose_second_loop_has_begun_is_not_done(tmp_path):
    """A crash in it would be taken for the end of the run."""

    def program(run, _total):
        run.track(model=nn.Linear(2, 1))
        outcomes = []
        for end in (1, 2):
            outcomes += [read_outcome(run.dir, 1).get("outcome") for _ in run.steps(end)]
        return outcomes

    assert start(tmp_path, program, 2) == [None, "left"]


def test_a_group_may_be_taken_out(tmp_path):
    def program(run, total):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        groups = [{"params": part.parameters()} for part in model]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(total):
            if step >= 2:
                del optimizer.param_groups[:-1]
            optimizer.param_groups[-1]["lr"] *= 0.5
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return facts(model[0].weight), facts(model[1].weight), optimizer.param_groups[0]["lr"]

    assert resumed(tmp_path, program, 1, 3, 5) == undisturbed(tmp_path, program, 5)


ODD = {
    "a parameter": nn.Parameter(torch.ones(2)),
    "no number": torch.tensor([float("nan"), 1.0]),
    "complex": torch.tensor(1 - 2j),
    "half bytes": torch.zeros(1, dtype=torch.uint8).view(torch.int4),
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_a_value_of_a_group_keeps_its_type_and_bits(tmp_path, value):
    def program(run, total):
        model = nn.Linear(2, 1)
        optimizer = Counting(model.parameters())
        hook = lambda *_: optimizer.param_groups[0].update(own=copy.deepcopy(value))  # noqa: E731
        optimizer.register_step_post_hook(hook)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(total):
            seen = facts(optimizer.param_groups[0].get("own"))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return seen

    assert resumed(tmp_path, program, 2, 3) == facts(value)


def counting_from(run, total, first):
    model = nn.Linear(2, 1)
    optimizer = Counting(model.parameters())
    optimizer.param_groups[0]["k"] = first
    return trained(run, total, model, optimizer)


def test_a_number_of_the_optimizers_own_goes_on_however_it_began_this_time(tmp_path):
    """Only for an argument of the constructor another value means that a person has changed it."""
    start(tmp_path, lambda run, total: counting_from(run, total, 0), 3)

    _, (group,) = start(tmp_path, lambda run, total: counting_from(run, total, 100), 4)

    assert group["k"] == 4


def test_what_only_the_program_sets_is_the_programs_and_a_difference_is_said(tmp_path, caplog):
    start(tmp_path, counting, 3)

    _, (group,) = start(tmp_path, lambda run, total: counting(run, total, lr=0.01), 4)

    assert group["lr"] == 0.01
    assert group["k"] == 4
    said = "lr was set to 0.1 before and is set to 0.01 now: the program's counts"
    assert said in [record.message for record in caplog.records]


def with_a_rate_that_the_loop_lowers(run, total, lr=0.1):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def lower(step):
        if step == 1:
            optimizer.param_groups[0]["lr"] *= 0.1

    return trained(run, total, model, optimizer, change=lower)


def test_a_rate_that_the_loop_has_changed_goes_on(tmp_path):
    end = resumed(tmp_path, with_a_rate_that_the_loop_lowers, 3, 4, 6)

    assert end == undisturbed(tmp_path, with_a_rate_that_the_loop_lowers, 6)


def test_a_rate_that_a_person_changes_counts_before_one_that_the_loop_has_changed(tmp_path, caplog):
    start(tmp_path, with_a_rate_that_the_loop_lowers, 3)

    _, (group,) = start(
        tmp_path, lambda run, total: with_a_rate_that_the_loop_lowers(run, total, lr=0.5), 4
    )

    assert group["lr"] == 0.5
    assert any(
        "lr was set to 0.1 before and is set to 0.5 now" in r.message for r in caplog.records
    )


def with_scheduler(run, total, lr=0.1, momentum=0.5):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return trained(run, total, model, optimizer, scheduler=scheduler)


def test_a_tracked_scheduler_goes_on_and_the_rate_that_does_not_count_is_said(tmp_path, caplog):
    start(tmp_path, with_scheduler, 3)

    _, (group,) = start(
        tmp_path, lambda run, total: with_scheduler(run, total, lr=0.01, momentum=0.9), 4
    )

    assert group["lr"] == pytest.approx(0.1 * 0.01)
    assert group["momentum"] == 0.9  # StepLR does not set it
    lines = [record.message for record in caplog.records]
    assert any(
        "lr was set to 0.1 before and is set to 0.01 now: the checkpoint's counts" in line
        for line in lines
    )
    assert any("momentum was set to 0.5 before and is set to 0.9 now" in line for line in lines)


def in_any_order(run, total, *, turned=(), scheduled=True, kind="lambda"):
    """Two groups; a start in `turned` gives them the other way round."""
    model = nn.Linear(2, 1)
    groups = [
        {"params": [model.weight], "lr": 0.1, "name": "weight"},
        {"params": [model.bias], "lr": 0.001, "name": "bias"},
    ]
    if total in turned:
        groups.reverse()
    optimizer = Counting(groups)
    scheduler = None
    if scheduled:
        make = {
            "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n),
            "chain": lambda: torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 1),
                 torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.8**n)],
                [2],
            ),
            "plateau": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        }  # fmt: skip
        scheduler = make[kind]()
    weights, groups = trained(run, total, model, optimizer, scheduler=scheduler)
    return weights, sorted(groups, key=lambda group: group["name"])


@pytest.mark.parametrize("kind", ["lambda", "chain", "plateau"])
@pytest.mark.parametrize("scheduled", [True, False])
def test_groups_in_another_order_keep_each_its_own_values(tmp_path, scheduled, kind):
    def program(run, total):
        return in_any_order(run, total, turned=(6,), scheduled=scheduled, kind=kind)

    end = resumed(tmp_path, program, 4, 6)

    expected = start(
        tmp_path / "other", lambda *a: in_any_order(*a, scheduled=scheduled, kind=kind), 6
    )
    assert end == expected


def split_in_another_way(run, total, *, rates=(0.1, 0.1), allow=()):
    """Three groups at first and two later; then one."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    parameters = list(model.parameters())
    cuts = {3: [parameters[:1], parameters[1:3], parameters[3:]], 5: [parameters[:2],
            parameters[2:]], 7: [parameters]}[total]  # fmt: skip
    groups = [{"params": part} for part in cuts]
    for group, d in zip(groups, rates, strict=False):
        group["d"] = d
    run.track(allow=allow)
    return trained(run, total, model, Counting(groups))


def test_groups_that_are_split_in_another_way_go_on_where_they_were_alike(tmp_path):
    def program(run, total):
        return split_in_another_way(run, total, rates=())

    start(tmp_path, program, 3)
    start(tmp_path, program, 5)
    _, (group,) = start(tmp_path, program, 7)

    assert group["k"] == 7


def test_groups_with_numbers_of_their_own_do_not_become_one_unasked(tmp_path):
    start(tmp_path, split_in_another_way, 3)
    start(tmp_path, split_in_another_way, 3)

    def different(run, total):
        return split_in_another_way(run, total, rates=(0.1, 0.2, 0.3))

    start(tmp_path / "other", different, 3)
    with pytest.raises(CheckpointError, match=r"are one group .*optimizer-changed"):
        start(tmp_path / "other", different, 5)


def test_an_empty_group_keeps_its_values_and_its_place(tmp_path):
    def program(run, total):
        model = nn.Linear(2, 1, bias=False)
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [], "lr": 0.5}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return trained(run, total, model, optimizer, scheduler=scheduler)

    assert resumed(tmp_path, program, 3, 6) == undisturbed(tmp_path, program, 6)


def test_a_rate_in_a_tensor_stays_the_programs_tensor(tmp_path):
    held = []

    def program(run, total):
        model = nn.Linear(2, 1)
        rate = torch.tensor(0.1)
        held.append(rate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        weights, (group,) = trained(run, total, model, optimizer, scheduler=scheduler)
        assert group["lr"] is rate
        return weights, float(group["lr"])

    assert resumed(tmp_path, program, 3, 5) == undisturbed(tmp_path, program, 5)


def test_a_group_that_the_loop_adds_takes_the_values_that_wait_for_it(tmp_path):
    def program(run, total):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = Counting(model[1].parameters())

        def add(step):
            if step >= 1 and len(optimizer.param_groups) == 1:
                group = {"params": list(model[0].parameters()), "d": 0.01, "growth": 1.2}
                optimizer.add_param_group(group)

        return trained(run, total, model, optimizer, change=add)

    expected = undisturbed(tmp_path, program, 8)
    _, groups = resumed(tmp_path, program, 4, 8)

    # The loop adds it after the first step of the start: that one step is without it.
    assert [group["k"] for group in groups] == [8, 8 - 2 - 1]
    assert [group["k"] for group in expected[1]] == [8, 8 - 2]


def test_what_waits_for_a_group_goes_through_the_saves_in_between(tmp_path):
    def program(run, total):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        layers = [model[1]] if total == 5 else [model[1], model[0]]
        return trained(run, total, model, Counting([{"params": [*m.parameters()]} for m in layers]))

    _, groups = resumed(tmp_path, program, 4, 5, 7)

    assert [group["k"] for group in groups] == [7, 6]


def test_what_cannot_be_saved_of_a_group_is_the_programs_while_nobody_changes_it(tmp_path, caplog):
    def program(run, total):
        model = nn.Linear(2, 1)
        group = {"params": [*model.parameters()], "shape": lambda value: value}
        return trained(run, total, model, Counting([group]))[0]

    assert resumed(tmp_path, program, 3, 5) == undisturbed(tmp_path, program, 5)
    assert not [r for r in caplog.records if "shape" in r.message]


def test_what_cannot_be_saved_is_refused_where_the_optimizer_puts_it_there(tmp_path):
    def program(run, total):
        model = nn.Linear(2, 1)
        optimizer = Counting(model.parameters())
        optimizer.register_step_post_hook(
            lambda *_: optimizer.param_groups[0].update(shape=lambda value: value)
        )
        return trained(run, total, model, optimizer)

    with pytest.raises(CheckpointError, match="put a function into shape of a group"):
        start(tmp_path, program, 3)


def adversarial(run, total, *, turned=()):
    """A second model with an optimizer of its own, whose groups come the other way round once."""
    model, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    groups = [
        {"params": [critic.weight], "lr": 0.1, "name": "weight"},
        {"params": [critic.bias], "lr": 0.001, "name": "bias"},
    ]
    if total in turned:
        groups.reverse()
    second = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(second, 2, 0.5)
    tracked = {"critic": critic}
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, second=second, **tracked)
    for _ in run.steps(total):
        second.zero_grad()
        critic(model(torch.randn(4, 2)).detach()).pow(2).mean().backward()
        second.step()
        optimizer.zero_grad()
        critic(model(torch.randn(4, 2))).mean().backward()
        optimizer.step()
        scheduler.step()
    rates = {group["name"]: group["lr"] for group in second.param_groups}
    return values(model, critic), rates, sorted(map(sum, [scheduler.get_last_lr()]))


def test_a_second_optimizer_goes_on_whatever_the_order_of_its_groups(tmp_path):
    def program(run, total):
        return adversarial(run, total, turned=(6,))

    end = resumed(tmp_path, program, 3, 6)

    assert end == start(tmp_path / "other", adversarial, 6)
    assert end[1] == {"weight": 0.1 * 0.125, "bias": 0.001 * 0.125}


def test_a_second_optimizer_of_other_parameters_is_refused(tmp_path):
    def program(run, total):
        model, critic = nn.Linear(2, 2), nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        second = torch.optim.SGD([critic.weight if total == 2 else critic.bias], lr=0.1)
        run.track(model=model, optimizer=optimizer, critic=critic, second=second)
        for _ in run.steps(total):
            pass

    start(tmp_path, program, 2)
    with pytest.raises(CheckpointError, match=r"critic\.bias is updated by a tracked optimizer"):
        start(tmp_path, program, 3)


def as_before(monkeypatch):
    """Checkpoints have no groups, as those of earlier versions."""
    monkeypatch.setattr("hpctrain.train.runtime.program.Program.begin", lambda _: None)


def scheduled_adamw(run, total):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return trained(run, total, model, optimizer, scheduler=scheduler)


def test_a_checkpoint_without_groups_goes_on_by_its_schedulers_rates(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        as_before(patch)
        resumed(tmp_path, scheduled_adamw, 3)

    end = resumed(tmp_path, scheduled_adamw, 4, 6)

    assert end == undisturbed(tmp_path, scheduled_adamw, 6)


def test_rates_for_more_groups_than_there_are_are_refused(tmp_path):
    def program(run, total):
        model = nn.Linear(2, 1)
        groups = [[*model.parameters()]] if total > 3 else [[model.weight], [model.bias]]
        optimizer = torch.optim.SGD([{"params": part} for part in groups], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return trained(run, total, model, optimizer, scheduler=scheduler)

    with pytest.MonkeyPatch.context() as patch:
        as_before(patch)
        start(tmp_path, program, 3)

    with pytest.raises(CheckpointError, match="has 1 parameter groups and had 2"):
        start(tmp_path, program, 4)


def test_another_optimizer_is_seen_without_the_name_of_its_class(tmp_path):
    def program(run, total):
        model = nn.Linear(2, 1)
        kind = torch.optim.AdamW if total == 3 else torch.optim.SGD
        return trained(run, total, model, kind(model.parameters(), lr=0.1))

    with pytest.MonkeyPatch.context() as patch:
        as_before(patch)
        start(tmp_path, program, 3)

    with pytest.raises(
        CheckpointError, match=r"has exp_avg, exp_avg_sq, step .*, which SGD has not"
    ):
        start(tmp_path, program, 4)


def test_asking_what_an_optimizer_keeps_changes_nothing_of_it():
    from hpctrain.train.runtime.fitting import keys_made

    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), amsgrad=True)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the program's hook ran"))
    optimizer.register_step_post_hook(lambda *_: pytest.fail("the program's hook ran"))
    before = {**optimizer.param_groups[0]}

    made = keys_made(optimizer, optimizer.param_groups[0], 2)

    assert made == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert optimizer.param_groups[0] == before
    assert not optimizer.state
    assert keys_made(Counting(model.parameters()), optimizer.param_groups[0], 2) is None


def test_groups_of_a_second_optimizer_do_not_become_one(tmp_path):
    def program(run, total):
        model, critic = nn.Linear(2, 2), nn.Linear(2, 1)
        groups = [[critic.weight], [critic.bias]] if total == 2 else [[*critic.parameters()]]
        second = torch.optim.SGD([{"params": part} for part in groups], lr=0.1)
        run.track(model=model, critic=critic, second=second)
        for _ in run.steps(total):
            pass

    start(tmp_path, program, 2)
    with pytest.raises(CheckpointError, match=r"critic\.weight and others .* were in 2 groups"):
        start(tmp_path, program, 3)


def test_a_group_without_parameters_does_not_wait_for_a_later_one():
    """Else each later checkpoint would have it again, beside the groups that there are."""
    from hpctrain.train.runtime.fitting import ParamGroups

    def groups(*counts):
        model = nn.Linear(2, 1)
        given = [[*model.parameters()][:count] for count in counts]
        held = ParamGroups(torch.optim.SGD([{"params": part} for part in given], lr=0.1), model)
        held.begin()
        return held

    resumed = groups(2)
    resumed.load_state_dict(groups(2, 0).state_dict())

    assert len(resumed.state_dict()["groups"]) == 1
