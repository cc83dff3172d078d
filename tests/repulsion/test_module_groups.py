"""Repulsion between modules and between stacked particles: against the rule on stacked tensors, in float64."""

import copy
import warnings

import pytest
import torch
from torch import nn

from repulsive import (
    SGLD,
    SPOS,
    SVGD,
    CosineLadder,
    OptimizerError,
    RuleError,
    SelectionError,
    StateError,
    UnsupportedWeights,
    group_modules,
    group_stacked,
    repel,
)
from repulsive.heads.layout import HeadGroup
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from tests.ranks import start_ranks

RULES = [
    SVGD(alpha=1.0),
    SVGD(alpha=1.0, kernel="imq", prior="gaussian", bandwidth="released"),
    SVGD(alpha="auto", ratio=0.5, space="sphere", smoothing=0.0),
    SVGD(alpha=1.0, kernel="hinge", space="sphere"),
    SVGD(alpha=1.0, kernel=lambda x, y: torch.exp(-(x - y).square().sum(-1))),
    CosineLadder(alpha=1.0),
    SGLD(0.3, 0.0),
]


class Ensemble(nn.Module):
    """Members with a hidden layer; the loss is a mean over members, or over some of them."""

    def __init__(self, members: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        nets = [nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(members)]
        self.members = nn.ModuleList(nets).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([member(x) for member in self.members])  # [M, B, 2]


def backward(model: Ensemble, index: int = 0, members: list[int] | None = None) -> None:
    source = torch.Generator().manual_seed(index)
    x = torch.randn(8, 3, generator=source, dtype=torch.float64)
    y = torch.randint(2, (8,), generator=source)
    for number in range(len(model.members)) if members is None else members:
        nn.functional.cross_entropy(model.members[number](x), y).backward()


def stacked(model: Ensemble, path: str, grad: bool = False) -> torch.Tensor:
    tensors = [dict(member.named_parameters())[path] for member in model.members]
    values = [(t.grad if t.grad is not None else torch.zeros_like(t)) if grad else t.detach() for t in tensors]
    return torch.stack([value.flatten() for value in values]).clone()


def attach(model, rule, groups=None, **options):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    groups = group_modules(model.members, part="member") if groups is None else groups
    return optimizer, repel(model, optimizer, rule, groups=groups, verbose=False, **options)


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_every_rule_equals_itself_on_stacked_tensors(rule):
    model = Ensemble()
    _, handle = attach(model, rule)
    backward(model)
    expected = {
        path: rule.gradient(stacked(model, path), stacked(model, path, grad=True)) for path in ("0.weight", "2.weight")
    }
    bias = stacked(model, "0.bias", grad=True)
    handle.apply()
    for path, value in expected.items():
        torch.testing.assert_close(stacked(model, path, grad=True), value, rtol=1e-9, atol=1e-12)
    assert torch.equal(stacked(model, "0.bias", grad=True), bias)


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_joined_modules_are_one_vector(rule):
    model = Ensemble()
    groups = group_modules(model.members, part="member", particle="module", parameters="*")
    _, handle = attach(model, rule, groups)
    backward(model)
    paths = [path for path, _ in model.members[0].named_parameters()]
    theta, grad = (torch.cat([stacked(model, path, g) for path in paths], 1) for g in (False, True))
    expected = rule.gradient(theta, grad)
    handle.apply()
    result = torch.cat([stacked(model, path, grad=True) for path in paths], 1)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [RULES[0], RULES[2]], ids=["weights", "sphere"])
def test_permuting_modules_permutes_the_result(rule):
    results = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        model = Ensemble()
        _, handle = attach(model, rule, group_modules([model.members[i] for i in order]))
        backward(model)
        handle.apply()
        results.append(stacked(model, "0.weight", grad=True))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_accumulated_gradients_are_changed_once():
    rule = SVGD(stepsize=4.0, alpha=1.0)
    model = Ensemble()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    repel(model, optimizer, rule, groups=group_modules(model.members), verbose=False)
    backward(model, 0)
    backward(model, 1)
    before, grad = stacked(model, "2.weight"), stacked(model, "2.weight", grad=True)
    optimizer.step()
    expected = before - rule.gradient(before, grad)
    torch.testing.assert_close(stacked(model, "2.weight"), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "noise_in"),
    [
        *((rule, "gradient") for rule in RULES[:5]),
        (SPOS(0.1, 1.0, 10.0), "gradient"),
        (SPOS(0.1, 1.0, 10.0), "parameter"),
    ],
    ids=range(7),
)
def test_a_member_without_gradient_stays_and_repels_the_others(rule, noise_in):
    model = Ensemble()
    optimizer, handle = attach(model, rule, noise_in=noise_in)
    idle = {name: value.clone() for name, value in model.members[2].state_dict().items()}
    backward(model, members=[0, 1, 3])
    theta, grad = stacked(model, "0.weight"), stacked(model, "0.weight", grad=True)
    if not rule.has_noise:
        handle.apply()
        expected = rule.gradient(theta, grad)
        expected[2] = 0
        torch.testing.assert_close(stacked(model, "0.weight", grad=True), expected, rtol=1e-9, atol=1e-12)
    optimizer.step()
    assert model.members[2][0].weight.grad is None
    assert all(torch.equal(value, idle[name]) for name, value in model.members[2].state_dict().items())
    assert not torch.equal(stacked(model, "0.weight")[0], theta[0])
    assert all(line.skipped == 0 for line in handle.report()) and handle.steps == 1


def test_steps_without_any_gradient_are_counted():
    model = Ensemble()
    optimizer, handle = attach(model, SVGD(alpha=1.0))
    for member in model.members:
        member[0](torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert [line.skipped for line in handle.report()] == [0, 1]


@pytest.mark.parametrize("noise_in", ["gradient", "parameter"])
def test_noise_of_each_member_and_its_learning_rate(noise_in):
    """Members in optimizer groups with different rates: sigma follows the rate, and no two members share noise."""
    draws = {}
    for rates in ([0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.4]):
        model = Ensemble()
        optimizer = torch.optim.SGD(
            [{"params": m.parameters(), "lr": lr} for m, lr in zip(model.members, rates, strict=True)]
        )
        groups = group_modules(model.members)
        repel(model, optimizer, SGLD(1.0, 0.5), groups=groups, verbose=False, seed=3, noise_in=noise_in)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = stacked(model, "0.weight")
        optimizer.step()
        draws[tuple(rates)] = stacked(model, "0.weight") - before
    same, other = draws.values()
    torch.testing.assert_close(other[:3], same[:3])
    torch.testing.assert_close(other[3], same[3] * 2)  # lr * sqrt(2 T / lr) grows as sqrt(lr)
    assert torch.pdist(same).min() > 0.1 * same.norm() / 2


def test_stacked_experts_follow_the_rule():
    for rule in RULES:
        torch.manual_seed(0)
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.randn(5, 3, 4, dtype=torch.float64))
        layer.weight.grad = torch.randn_like(layer.weight)
        expected = rule.gradient(layer.weight.detach().flatten(1), layer.weight.grad.flatten(1)).view(5, 3, 4)
        _, handle = attach(layer, rule, group_stacked(layer, "weight"))
        handle.apply()
        torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-9, atol=1e-12)


def test_stacked_and_separate_experts_train_alike():
    rule = SVGD(alpha="auto", ratio=0.3, space="sphere", smoothing=0.0)
    model = Ensemble()
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.stack([member[0].weight.detach() for member in model.members]))
    optimizer, _ = attach(model, rule, group_modules(model.members, parameters="0.weight"))
    twin, _ = attach(layer, rule, group_stacked(layer, "weight"))
    for index in range(5):
        optimizer.zero_grad()
        backward(model, index)
        layer.weight.grad = torch.stack([member[0].weight.grad for member in model.members])
        optimizer.step()
        twin.step()
    torch.testing.assert_close(stacked(model, "0.weight"), layer.weight.detach().flatten(1), rtol=1e-9, atol=1e-12)


def test_report_and_text():
    model = Ensemble()
    optimizer, handle = attach(model, SVGD(alpha=1.0), measure_every=1)
    backward(model)
    theta = stacked(model, "0.weight")
    optimizer.step()
    first = handle.report()[0]
    unit = nn.functional.normalize(theta, dim=1)
    cosine = (unit @ unit.T)[~torch.eye(4, dtype=torch.bool)].mean()
    assert (first.name, first.part, first.num_heads, first.step) == ("member.0.weight", "member", 4, 0)
    assert first.similarity == pytest.approx(float(cosine)) and first.repulsion > 0
    assert "2 groups of particles, step 1" in str(handle) and "similarity" in str(handle)


def test_the_line_names_particles(capsys):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4), "ensemble": Ensemble()})
    optimizer = torch.optim.Adam(model.parameters())
    groups = group_modules(model["ensemble"].members, part="member")
    repel(model, optimizer, groups=groups)
    line = capsys.readouterr().err
    assert "ModuleDict, 2 x 4 particles (member), 2 groups" in line and "left out" not in line


def test_the_table_shows_the_size_of_particles(capsys):
    model = Ensemble()
    repel(model, torch.optim.Adam(model.parameters()), groups=group_modules(model.members), verbose=True)
    title, first = capsys.readouterr().err.splitlines()[1:3]
    assert title.split()[3:5] == ["particles", "size"]
    assert first.split()[3:5] == ["4", str(model.members[0][0].weight.numel())]


def test_state_is_restored():
    model = Ensemble()
    optimizer, handle = attach(model, SPOS(0.1, 1.0, 10.0))
    for index in range(3):
        optimizer.zero_grad()
        backward(model, index)
        optimizer.step()
    saved, weights, adam = handle.state_dict(), model.state_dict(), copy.deepcopy(optimizer.state_dict())
    results = []
    for _ in range(2):
        twin = Ensemble(seed=1)
        other, again = attach(twin, SPOS(0.1, 1.0, 10.0))
        twin.load_state_dict(weights)
        other.load_state_dict(copy.deepcopy(adam))  # torch does not copy tensors
        again.load_state_dict(saved)
        backward(twin, 3)
        other.step()
        results.append(stacked(twin, "0.weight"))
        assert again.steps == 4
    optimizer.zero_grad()
    backward(model, 3)
    optimizer.step()
    assert torch.equal(stacked(model, "0.weight"), results[0]) and torch.equal(*results)
    _, smaller = attach(Ensemble(3), SVGD())
    with pytest.raises(StateError, match="other groups"):
        smaller.load_state_dict(saved)


def test_frozen_members():
    model = Ensemble()
    model.members[1][0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"member.0.weight \(member.1.0.weight is frozen\)"):
        _, handle = attach(model, SVGD())
    assert [group.name for group in handle.groups] == ["member.2.weight"]
    model.members[1].requires_grad_(False)
    with pytest.raises(OptimizerError, match=r"no group with all of its particles: .*member.1.2.weight is frozen"):
        attach(model, SVGD())


def test_a_list_of_modules_is_refused_with_the_remedy():
    members = list(Ensemble().members)
    optimizer = torch.optim.Adam([parameter for member in members for parameter in member.parameters()])
    with pytest.raises(SelectionError, match=r"got an object of type list; put the modules into an nn.ModuleList"):
        repel(members, optimizer, groups=group_modules(members))


def test_refused_combinations():
    model = Ensemble()
    groups = group_modules(model.members, part="q")
    with pytest.raises(RuleError, match=r"q.0.weight, q.2.weight: space='logits' compares attention logits"):
        attach(model, SVGD(space="logits"), groups)
    with pytest.raises(SelectionError, match=r"2 groups have this name.*name="):
        attach(model, SVGD(), [*group_modules(model.members[:2]), *group_modules(model.members[2:])])
    with pytest.raises(SelectionError, match="share weights"):
        attach(model, SVGD(), [*group_modules(model.members[:2]), *group_modules(model.members[1:], name="b")])
    attach(model, SVGD(), [*group_modules(model.members[:2]), *group_modules(model.members[2:], name="b")])


def test_modules_on_two_devices_are_refused():
    members = [nn.Linear(3, 2), nn.Linear(3, 2)]
    members[1].to("meta")
    model = nn.ModuleList(members)
    with pytest.raises(UnsupportedWeights, match="lie on cpu and meta"):
        attach(model, SVGD(), group_modules(members))


def fused_and_eager(parameter, part, rule, monkeypatch):
    from repulsive.repulsion.backends import launch_settings

    monkeypatch.setattr(launch_settings, "SPLITS", 2)
    group = HeadGroup("experts", 0, "expert", "-", "", "stacked", (part,))
    results = []
    for choice in ("eager", "triton"):
        monkeypatch.setenv("REPULSIVE_KERNELS", choice)
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        update = Update([group], seed=7)
        update.run(StepInputs(rule, 3, {id(parameter): 0.05}))
        assert (update._fused is not None and update._eager_rest is None) == (choice == "triton")
        results.append(parameter.grad)
    return results


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter on the CPU")
@pytest.mark.parametrize("shape", [(4, 3, 10), (6, 20), (5,), (3, 2, 4, 5)])
@pytest.mark.parametrize("rule", [SVGD(alpha=1.0), RULES[2], SPOS(0.1, 1.0, 10.0)], ids=["weights", "sphere", "noise"])
def test_fused_stacked_experts_equal_eager_ones(shape, rule, monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(shape))
    (group,) = group_stacked(layer, "weight")
    eager, fused = fused_and_eager(layer.weight, group.slices[0], rule, monkeypatch)
    # On the sphere of one dimension no force acts, and rounding errors are scaled up, to at most 1e-4 of the ratio.
    tolerance = 5e-5 if shape == (5,) and rule.holds_ratio else 3e-6
    assert float((fused - eager).norm() / eager.norm()) < tolerance


def test_zero_particles_do_not_warn_of_nan():
    model = Ensemble()
    with torch.no_grad():
        for member in model.members:
            member[0].weight.zero_()
    _, handle = attach(model, SVGD(alpha=1.0, space="sphere"))
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle.apply()
    assert stacked(model, "0.weight", grad=True).isfinite().all()


SHARDED = [SVGD(alpha=1.0), SPOS(0.1, 1.0, 10.0), SPOS(0.1, 1.0, 10.0, noise="released"), RULES[4]]


def train(model: nn.Module, ensemble: Ensemble, rule) -> list[torch.Tensor]:
    """Five steps, in one of which a member has no gradient; weights of the first layer of every member."""
    groups = group_modules(ensemble.members, particle="module", parameters="*")
    optimizer, _ = attach(model, rule, groups, measure_every=2)
    for index in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        outputs = model(x)  # [M, B, 2]
        (outputs if index != 3 else outputs[:-1]).square().mean().backward()
        optimizer.step()
    weights = [member[0].weight.detach() for member in ensemble.members]
    return [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights]


def _rank(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    for number, rule in enumerate(SHARDED):
        model = Ensemble()
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        found = train(model, model, rule)
        if rank == 0:
            torch.save(found, f"{folder}/{number}.pt")


@pytest.mark.slow
def test_sharded_members_equal_whole_ones(tmp_path):
    start_ranks(_rank, str(tmp_path))
    for number, rule in enumerate(SHARDED):
        model = Ensemble()
        expected = train(model, model, rule)
        found = torch.load(tmp_path / f"{number}.pt")
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
