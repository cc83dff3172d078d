"""Repulsion between logits of weights in einsum notation, against the reference implementation."""

import copy
import io

import pytest
import torch

from repulsive import SVGD, repel
from repulsive.errors import RuleError
from tests.diagnostics.einsum_models import TOKENS, Lens, Stack, X, hooked
from tests.repulsion.logits.einsum_models import EINSUM, build, project
from tests.repulsion.logits.oracle import energy
from tests.repulsion.logits.test_force import ALL, expected_of, received_by

pytestmark = pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")


@pytest.mark.parametrize("name", EINSUM)
@pytest.mark.parametrize("kernel", ["rbf", "cosine"])
def test_gradients_match_the_reference(name: str, kernel: str) -> None:
    torch.manual_seed(0)
    case = build(name)
    received = received_by(case, SVGD(stepsize=0.3, alpha=0.7, kernel=kernel, space="logits", tokens=ALL))
    expected = expected_of(case, kernel, 0.3 * 0.7 / len(case.reads))
    for label, one, other in zip(case.parameters, received, expected, strict=True):
        assert float(other.norm()) > 0, label
        assert float((one - other).norm()) <= 1e-10 * float(other.norm()), label


@pytest.mark.parametrize(
    ("name", "value", "bias", "out", "axes"),
    [("einsum", "W_V", "b_V", "W_O", "med"), ("xlnet", "v", None, "o", "emd")],
)
def test_value_output_circuits_match_the_reference(name, value, bias, out, axes) -> None:
    torch.manual_seed(0)
    case = build(name)
    rule = SVGD(stepsize=0.3, alpha=0.7, kernel="cosine", space="logits", circuits="qk+ov", tokens=ALL)
    own = received_by(case, rule)
    for one, other in zip(own, expected_of(case, "cosine", 0.3 * 0.7 / len(case.reads)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)  # q and k of the same layer
    inputs: list[torch.Tensor] = []
    hook = case.attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    case.call()
    hook.remove()
    x = inputs[0].transpose(0, 1) if name == "xlnet" else inputs[0]
    names = [each for each in (value, bias, out) if each]
    parts = [case.attention.get_parameter(each) for each in names]
    v = project(x, parts[0], parts[1] if bias else 0, axes)
    v = v.flatten(0, 1) if case.valid_q is None else v[case.valid_q]  # [N, M, d]
    output = parts[-1].movedim(0, 2) if name == "xlnet" else parts[-1]  # [M, d, D]
    vectors = [(v[:, head] @ output[head]).flatten() for head in range(len(case.reads))]
    expected = torch.autograd.grad(0.3 * 0.7 / len(case.reads) * energy(vectors, "cosine"), parts)
    for part, other in zip(parts, expected, strict=True):
        torch.testing.assert_close(part.grad, other, rtol=1e-9, atol=1e-15)


def train(model, optimizer, steps):
    for _ in range(steps):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def attached(model, **more):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rule = SVGD(stepsize=0.3, alpha=0.7, space="logits", tokens=8, every=2)
    return optimizer, repel(model, optimizer, rule, example_inputs=X, verbose=False, **more)


def test_a_resumed_run_is_identical() -> None:
    model = Stack()
    optimizer, handle = attached(model)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), handle.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 3)
    resumed = Stack()
    resumed.load_state_dict(saved[0])
    optimizer, handle = attached(resumed)
    handle.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    train(resumed, optimizer, 3)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_copies_and_pickles_of_a_model_do_not_sample() -> None:
    model = Stack()
    optimizer, handle = attached(model)
    twin = copy.deepcopy(model)
    twin(X).sum().backward()
    torch.save(model, io.BytesIO())
    assert not handle._logits.sampler.samples
    train(model, optimizer, 1)
    assert len(handle.report()) == 4
    handle.remove()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_training_goes_on_after_an_exception_in_a_layer(error, monkeypatch) -> None:
    model, other = Stack(), Stack()
    runs = [attached(each) for each in (model, other)]

    def fail(_layer, *_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Lens, "project", fail)
        with pytest.raises(error):
            model(X)
    for each, (optimizer, _) in zip((model, other), runs, strict=True):
        train(each, optimizer, 2)
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, expected)
    while torch.overrides._get_current_function_mode() is not None:  # an interrupt leaves an inactive mode behind
        assert not torch.overrides._get_current_function_mode().is_active
        torch.overrides._pop_mode()


def test_a_compiled_model_is_refused() -> None:
    model = Stack()
    attached(model)
    with pytest.raises(RuleError, match=r"does not support torch\.compile with weights in einsum notation"):
        torch.compile(model, backend="eager", fullgraph=True)(X)


def test_an_own_input_for_each_head_is_refused() -> None:
    model = hooked(use_split_qkv_input=True)
    optimizer = torch.optim.Adam(model.parameters())
    repel(model, optimizer, SVGD(space="logits"), verbose=False)
    with pytest.raises(RuleError, match=r"the same for all heads, got \[2, 7, 4, 24\]\..* set use_split_qkv_input"):
        model(TOKENS)
