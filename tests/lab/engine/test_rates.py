"""Learning rates: factors of parameters, schedules, warm-up."""

import pytest
import torch
from torch import nn

from repulsive.lab.engine.methods import make_optimizer, rate_at, set_rate
from repulsive.lab.engine.recipe import Optimizer
from tests.lab.engine import tiny


def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    made[2].bias.requires_grad_(False)
    return made


def test_without_factors_there_is_one_group():
    made = make_optimizer(Optimizer(), model())
    assert len(made.param_groups) == 1 and len(made.param_groups[0]["params"]) == 5
    set_rate(made, 0.25)
    assert made.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_a_factor_is_a_rate_of_its_own(name):
    """Compare with one optimizer per parameter, whose rate is the product."""
    whole, alone = model(), model()
    factors = {"0.weight": 0.5, "1.weight": 0.1, "1.bias": 0.5}
    settings = Optimizer(name=name, lr=0.3, weight_decay=0.01)
    made = make_optimizer(settings, whole, factors)
    assert sorted(group["factor"] for group in made.param_groups) == [0.1, 0.5, 1.0]
    assert sum(len(group["params"]) for group in made.param_groups) == 5  # frozen parameters are in no group
    singles = []
    for parameter, own in alone.named_parameters():
        if own.requires_grad:
            holder = nn.ParameterDict({"one": own})
            singles.append((make_optimizer(settings, holder), factors.get(parameter, 1.0)))
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        rate = 0.3 / (step + 1)
        for one in (whole, alone):
            one.zero_grad()
            one(x).square().mean().backward()
        set_rate(made, rate)
        made.step()
        for single, factor in singles:
            set_rate(single, rate * factor)
            single.step()
    for a, b in zip(whole.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_factors_come_back_from_a_state():
    first, second = (make_optimizer(Optimizer(), model(), {"0.weight": 0.5}) for _ in range(2))
    set_rate(first, 1e-3)
    second.load_state_dict(first.state_dict())
    set_rate(second, 1.0)
    assert sorted(group["lr"] for group in second.param_groups) == [0.5, 1.0]


def test_mistakes():
    with pytest.raises(ValueError, match=r"factors for 9\.weight: the model has no such parameter"):
        make_optimizer(Optimizer(), model(), {"9.weight": 0.5})
    with pytest.raises(ValueError, match=r"the factor of 0\.weight is 0"):
        make_optimizer(Optimizer(), model(), {"0.weight": 0.0})


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse-sqrt"])
def test_a_share_of_the_steps_is_a_number_of_them(schedule):
    share = Optimizer(lr=2.0, schedule=schedule, warmup_share=0.1)
    steps = Optimizer(lr=2.0, schedule=schedule, warmup=20)
    assert [rate_at(step, share, 200) for step in range(200)] == [rate_at(step, steps, 200) for step in range(200)]
    both = Optimizer(lr=2.0, schedule=schedule, warmup=20, warmup_share=0.5)
    assert rate_at(3, both, 200) == rate_at(3, steps, 200)


@pytest.mark.parametrize(
    ("name", "lr", "expected"),
    [
        ("cycle-5", 0.25, [0.25, 0.2, 0.15, 0.1, 0.05, 0.25, 0.2]),  # GraphWriter's paper
        ("cycle-4", 0.5, [0.5, 0.4, 0.3, 0.2, 0.5, 0.4, 0.3]),  # -lrwarm of its code
    ],
)
def test_a_cycle_falls_epoch_by_epoch_and_starts_over(name, lr, expected, data, tmp_path):
    settings = Optimizer(lr=lr, schedule=name)
    assert [rate_at(0, settings, 70, epoch) for epoch in range(7)] == pytest.approx(expected)
    folder = tiny.train(data, tmp_path, f"optimizer.schedule={name}", "training.epochs=7", "training.log_every=10")
    seen = [line["lr"] for line in folder.lines() if line["kind"] == "train"]
    assert seen == pytest.approx([x / lr * 2e-3 for x in expected])  # ten steps are an epoch


def test_a_warm_up_is_multiplied_with_a_cycle():
    settings = Optimizer(lr=1.0, schedule="cycle-5", warmup=4)
    found = [rate_at(step, settings, 12, step // 3) for step in range(6)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0 * 0.8, 0.8, 0.8])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_may_end_above_zero(schedule):
    settings = Optimizer(lr=2.0, schedule=schedule, warmup=10, final=0.1)
    assert rate_at(9, settings, 110) == 2.0 and rate_at(10, settings, 110) == 2.0
    assert rate_at(60, settings, 110) == pytest.approx(2.0 * 0.55)  # half-way between 1 and 0.1
    assert rate_at(110, settings, 110) == pytest.approx(0.2)


def test_an_end_that_a_schedule_does_not_have():
    with pytest.raises(ValueError, match="does not use it"):
        Optimizer(schedule="constant", final=0.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Optimizer(schedule="linear", final=1.5)
