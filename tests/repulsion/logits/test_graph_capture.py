"""Tokens are sampled inside a CUDA graph as well: at fixed positions, renewed by every replay."""

import pytest
import torch

from repulsive import SVGD
from repulsive.repulsion.logits import sampler as sampler_module
from repulsive.repulsion.logits import samples as samples_module
from repulsive.repulsion.logits import token_positions
from tests.repulsion.logits.small_decoder import batch, loss_of
from tests.repulsion.logits.test_launches import deep

RULE = SVGD(alpha=0.05, space="logits", tokens=32, every=1)


def test_positions_in_a_graph_do_not_depend_on_the_step():
    first = token_positions.choose((4, 10), 8, None, torch.device("cpu"), seed=0, step=None)
    second = token_positions.choose((4, 10), 8, None, torch.device("cpu"), seed=1, step=None)
    assert torch.equal(first.index, second.index)
    assert len(first.index.unique()) == len(first.index) and 0 <= first.index.min() <= first.index.max() < 40


def test_positions_in_a_graph_leave_padding_out():
    valid = torch.tensor([[True] * 7 + [False] * 3, [True] * 2 + [False] * 8])
    chosen = token_positions.choose((2, 10), 10, valid, torch.device("cpu"), seed=0, step=None)
    assert valid.flatten()[chosen.index[chosen.weights > 0]].all()
    assert chosen.weights.sum() > 0


def test_tokens_of_a_graph_are_kept_for_its_replays(monkeypatch):
    """A replay runs no Python: tokens of the captured pass must be there in the next step as well."""
    model, optimizer, handle = deep(2, RULE)
    for module in (samples_module, sampler_module):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    loss_of(model, batch(0)).backward()
    for module in (samples_module, sampler_module):
        monkeypatch.setattr(module, "is_capturing", lambda: False)
    tokens = dict(handle._logits.sampler.samples)
    assert tokens
    for _ in range(2):
        optimizer.step()
        assert handle._logits.sampler.samples == tokens
    eager = loss_of(model, batch(1))
    eager.backward()
    assert all(handle._logits.sampler.samples[key] is not sample for key, sample in tokens.items())


@pytest.mark.gpu
def test_a_captured_pass_equals_an_eager_one(monkeypatch):
    original = token_positions.choose
    monkeypatch.setattr(samples_module, "choose", lambda *args, **kw: original(*args, **{**kw, "step": None}))
    results = []
    for captured in (False, True):
        model, optimizer, _ = deep(2, RULE, "cuda")
        ids = batch(0).cuda()
        if captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    loss_of(model, ids).backward()
            torch.cuda.current_stream().wait_stream(stream)
            optimizer.zero_grad(set_to_none=False)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss_of(model, ids).backward()
        for step in range(5):
            ids.copy_(batch(step))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            if captured:
                graph.replay()
            else:
                loss_of(model, ids).backward()
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    for eager, replayed in zip(*results, strict=True):
        assert torch.allclose(eager, replayed, rtol=1e-4, atol=1e-5)
