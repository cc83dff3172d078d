"""Passes whose tokens are sampled, and hooks that sample them."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from repulsive import SVGD, repel
from repulsive.repulsion.logits.repulsion import NoTokensWarning
from tests.repulsion.logits.small_decoder import RULE, Decoder, batch, loss_of, make, train


@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_models_are_sampled(order):
    expected = train(*make()[:2])
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    repel(compiled if order == "after" else model, optimizer, RULE, verbose=False, allow_unproved=True)
    torch.testing.assert_close(train(model, optimizer, run=compiled), expected)


def test_gradient_accumulation_uses_the_tokens_of_the_last_pass():
    model, optimizer, handle = make()
    loss_of(model, batch(7)).backward()
    loss_of(model, batch(0)).backward()
    optimizer.step()
    forces = [w.force.clone() for w in handle._logits.held[0].sides[0]]
    other, optimizer, handle = make()
    loss_of(other, batch(0)).backward()
    optimizer.step()
    for one, two in zip(forces, handle._logits.held[0].sides[0], strict=True):
        torch.testing.assert_close(one, two.force)


def test_evaluation_and_inference_are_not_sampled():
    model, _, handle = make()
    sampler = handle._logits.sampler
    model.eval()
    loss_of(model, batch(0)).backward()
    assert sampler.samples == {}
    model.train()
    with torch.no_grad():
        model(batch(0))
    assert sampler.samples == {}
    model(batch(0))
    assert len(sampler.samples) == 4


def test_transforms_of_torch_func_are_not_sampled():
    model, optimizer, handle = make()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values, ids):
        logits = torch.func.functional_call(model, values, (ids,))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def probe():
        torch.func.grad(loss)(parameters, batch(0))
        torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch(0).unsqueeze(1))

    probe()
    assert handle._logits.sampler.samples == {}
    loss_of(model, batch(1)).backward()
    taken = {key: sample.outputs for key, sample in handle._logits.sampler.samples.items()}
    probe()
    assert all(sample.outputs is taken[key] for key, sample in handle._logits.sampler.samples.items())
    optimizer.step()
    assert handle.steps == 1 and handle.report()[0].ratio > 0


def test_a_step_without_tokens_warns_once():
    model, optimizer, _ = make()
    model.eval()
    with pytest.warns(UserWarning, match="no tokens were seen") as caught:
        train(model, optimizer, range(1))
    assert [one.filename for one in caught] == [train.__code__.co_filename]  # the line that calls step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(1))


def test_tokens_of_a_pass_before_a_state_was_loaded_are_not_used():
    model, optimizer, handle = make(SVGD(alpha=0.05, space="logits", tokens=16, every=1))
    state = handle.state_dict()
    loss_of(model, batch(0)).backward()
    assert handle._logits.sampler.samples
    handle.load_state_dict(state)
    with pytest.warns(NoTokensWarning, match="no tokens were seen"):
        optimizer.step()


def test_hooks_are_registered_only_for_steps_that_need_tokens():
    model, optimizer, _ = make(SVGD(alpha=0.05, space="logits", tokens=64, every=3))
    counts = []
    for step in range(4):
        counts.append(sum(len(m._forward_hooks) for m in model.modules()))
        train(model, optimizer, range(step, step + 1))
    assert counts == [4, 0, 0, 4]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_a_model_with_hooks_says_what_to_do():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    handle = repel(model, torch.optim.AdamW(model.parameters()), RULE, verbose=False)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(AttributeError, match=r"cannot compile the hooks of space='logits': call handle.remove\(\)"):
            torch.jit.script(one)
    handle.remove()
    torch.jit.script(model)


def test_copies_of_the_model_are_not_sampled():
    model, _, handle = make()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other.train(), batch(0)).backward()
        assert handle._logits.sampler.samples == {}


def test_remove_removes_the_hooks():
    model, optimizer, handle = make()
    train(model, optimizer, range(1))
    handle.remove()
    hooks = [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert hooks == []
