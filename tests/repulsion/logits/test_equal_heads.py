"""Heads with equal, parallel and nearly equal functions: forces are zero or accurate, and finite."""

import pytest
import torch

from repulsive import SVGD, find_heads, repel
from tests.repulsion.logits.small_decoder import RULE, Decoder, batch, loss_of, make, train


def test_one_head_and_equal_heads_stay_finite():
    torch.manual_seed(0)
    model = Decoder(heads=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="one head"):
        repel(model, optimizer, RULE, groups=find_heads(model), verbose=False, allow_unproved=True)
    assert torch.isfinite(train(model, optimizer)).all()
    model, optimizer, _ = make()
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj):
                p.weight.unflatten(0, (4, -1)).copy_(p.weight.unflatten(0, (4, -1))[:1].clone())
                p.bias.zero_()
    with pytest.warns(UserWarning, match="all heads of a group are equal"):
        assert torch.isfinite(train(model, optimizer, range(2))).all()


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads")
@pytest.mark.parametrize("circuits", ["qk", "qk+ov"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factors", [(1, 1, 1, 1), (1, 2, 4, 8), (1, -1, 1, -1)], ids=str)
@pytest.mark.parametrize("alpha", [0.01, "auto"])
def test_parallel_functions_exert_no_force(alpha, factors, dtype, circuits):
    """The rounding error that is left used to be scaled up, by the bandwidth or to the target ratio."""
    rule = SVGD("heads", alpha, space="logits", circuits=circuits)
    model, optimizer, handle = make(rule)
    model.to(dtype)
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj, layer.v_proj):
                p.weight.unflatten(0, (4, -1)).copy_(p.weight.unflatten(0, (4, -1))[:1].clone())
                p.bias.zero_()
            layer.o_proj.weight.unflatten(1, (4, -1)).copy_(layer.o_proj.weight.unflatten(1, (4, -1))[:, :1].clone())
            for p in (layer.q_proj, layer.v_proj):
                p.weight.unflatten(0, (4, -1)).mul_(torch.tensor(factors, dtype=dtype)[:, None, None])
    loss_of(model, batch(0)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    assert all(report.repulsion == 0 for report in handle.report())


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pair_of_equal_heads_is_not_pushed(dtype):
    """The hinge kernel repels no other pair here."""
    model, optimizer, handle = make(SVGD("heads", "auto", kernel="hinge", space="logits"))
    model.to(dtype)
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj):
                p.weight[4:8], p.bias[4:8] = p.weight[:4], p.bias[:4]
    loss_of(model, batch(0)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    assert [(report.repulsion, report.largest > 0.999) for report in handle.report()] == [(0, True)] * 4


@pytest.mark.parametrize("kernel", ["rbf", "hinge"])
@pytest.mark.parametrize("apart", [1e-3, 1e-5])
def test_nearly_equal_heads_are_repelled(apart, kernel):
    """The force on float32 weights is that on the same weights in float64."""
    forces = []
    for dtype in (torch.float32, torch.float64):
        model, optimizer, _ = make(SVGD("heads", "auto", kernel=kernel, space="logits"))
        with torch.no_grad():
            for layer in model.layers:
                for p in (layer.q_proj, layer.k_proj):
                    rows = p.weight.unflatten(0, (4, -1))
                    rows.copy_(rows[:1] + apart * rows.flip(0))
                    p.bias.zero_()
        model.to(dtype)
        loss_of(model, batch(0)).backward()
        plain = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        force = [(p.grad - grad).double().flatten() for p, grad in zip(model.parameters(), plain, strict=True)]
        forces.append(torch.cat(force))
    single, double = forces
    assert float(single.norm()) == pytest.approx(float(double.norm()), rel=0.01)
    assert float(torch.cosine_similarity(single, double, dim=0)) > 0.9
