"""Work of the host in steps that compute a new force: shared positions, shared rows, norms of all layers at once."""

import copy

import pytest
import torch
from torch import nn

from repulsive import SVGD, repel
from repulsive.repulsion.logits import samples as samples_module
from repulsive.repulsion.logits.norms import formula_of, stack_formulas
from repulsive.repulsion.logits.samples import Samples
from tests.repulsion.logits.small_decoder import Attention, batch, loss_of, make
from tests.repulsion.logits.test_launches import Operations

RULE = SVGD(alpha=0.05, space="logits", tokens=32, every=1)


class Layers(nn.Module):
    """A decoder whose layers receive one mask [B, 1, T, T], as compiled models of transformers have it."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.embed, self.layers, self.out = nn.Embedding(30, 16), layers, nn.Linear(16, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril() & (ids < 25)[:, None, None, :]
        visible = visible | torch.eye(length, dtype=torch.bool)[:1]
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, attention_mask=visible)
        return self.out(x)


class Masked(Attention):
    """Attention with a mask and, if wanted, norms on q and k."""

    def __init__(self, has_norms: bool = False) -> None:
        super().__init__(16, 4)
        self.q_norm, self.k_norm = (nn.RMSNorm(4) if has_norms else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (4, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def deep(count: int, has_norms: bool = False):
    torch.manual_seed(0)
    model = Layers(nn.ModuleList(Masked(has_norms) for _ in range(count)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return model, optimizer, repel(model, optimizer, RULE, verbose=False, allow_unproved=True)


def test_layers_of_a_compiled_model_that_share_a_mask_share_positions(monkeypatch):
    calls = []
    whole = samples_module.choose
    monkeypatch.setattr(samples_module, "choose", lambda *args, **more: calls.append(1) or whole(*args, **more))
    weights = []
    for is_compiled in (False, True):
        model, optimizer, handle = deep(3)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        for step in range(2):
            calls.clear()
            loss_of(run, batch(step)).backward()
            assert len(calls) == 1 and len(handle._logits.sampler.samples) == 6
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_masks_of_a_compiled_model_are_copied_before_their_memory_is_reused():
    sampler = make(RULE)[2]._logits.sampler
    sampler.taken._checked = {(0, "q"), (1, "q")}  # these outputs are not projections
    mask = torch.ones(6, 1, 10, dtype=torch.bool)
    sampler.keep_mask(0, "attention_mask", mask)
    sampler.keep_mask(1, "attention_mask", mask)
    mask.zero_()
    tokens = torch.randn(6, 10, 16)
    for layer in (0, 1):
        sampler.take_tokens(2 * layer, tokens, tokens, None)
    assert sampler.masks.of_layers[0]["attention_mask"] is sampler.masks.of_layers[1]["attention_mask"]
    assert sampler.samples[0, "q"].weights.all() and sampler.samples[0, "q"].weights is sampler.samples[1, "q"].weights


def test_a_layer_that_reuses_the_memory_of_another_gives_its_own_tokens():
    """As in compiled models, whose buffers are overwritten as soon as nothing needs them."""
    layers = make(RULE)[2]._logits.layers
    taken = Samples(layers, 1000, 0)
    taken._checked = {(number, part) for number in (0, 1) for part in "qk"}  # these outputs are not projections
    buffer = torch.randn(6, 10, 16)
    for number in (0, 1, 1):  # the last layer runs twice, as one that shares its weights
        buffer.normal_()
        for part in "qk":
            taken.take(number, part, buffer, buffer, None, (6, 10))
            assert torch.equal(taken.latest[number, part].inputs[0], buffer.flatten(0, 1))
            assert torch.equal(taken.latest[number, part].outputs.flatten(1), buffer.flatten(0, 1))
    assert taken.latest[1, "q"].inputs[0] is taken.latest[1, "k"].inputs[0]


def test_norms_of_all_layers_are_computed_together():
    counts = []
    for layers in (2, 5):
        model, optimizer, handle = deep(layers, has_norms=True)
        for step in range(2):  # the first formula of a norm is checked
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            if step == 0:
                optimizer.step()
        with Operations() as operations:
            handle.apply()
        counts.append(operations.count)
    assert counts[0] == counts[1] and counts[0].total() < 210


class OnePlus(nn.RMSNorm):
    """Stores its scale minus one, as Gemma does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class Squared(nn.RMSNorm):
    """Its scale is another function of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.square() + 0.5, self.eps)


NORMS = {
    "rms": (nn.RMSNorm(8, eps=1e-3), 0.0),
    "all heads": (nn.RMSNorm(32, eps=1e-3), 0.0),
    "layer norm": (nn.LayerNorm(8, eps=1e-3), 0.0),
    "one plus": (OnePlus(8, eps=1e-3), 1.0),
    "squared": (Squared(8, eps=1e-3), None),
    "no weight": (nn.RMSNorm(8, eps=1e-3, elementwise_affine=False), None),
}


@pytest.mark.parametrize("name", NORMS)
def test_formulas_follow_the_weights_of_a_norm(name):
    norm, offset = copy.deepcopy(NORMS[name])
    norm = norm.double()
    torch.manual_seed(0)
    tokens = torch.randn(10, 4, 8, dtype=torch.float64)
    formulas = []
    for step in range(3):
        for parameter in norm.parameters():
            parameter.data.normal_()
        earlier = formulas[-1] if formulas else None
        formulas.append(formula_of(norm, tokens, "layer.q", earlier))
        expected = norm(tokens.flatten(1)).view(tokens.shape) if formulas[-1].whole else norm(tokens)
        torch.testing.assert_close(formulas[-1](tokens), expected, msg=f"{name}, step {step}")
        assert formulas[-1].offset == offset
    both = torch.stack([tokens, 2 * tokens])
    stacked = stack_formulas(formulas[:2])(both)
    torch.testing.assert_close(stacked, torch.stack([formulas[0](both[0]), formulas[1](both[1])]))


def test_a_state_without_tensors_needs_no_operation():
    """The Trainer's callback asks for it in every step."""
    model, optimizer, handle = make(SVGD(alpha=0.05, space="logits", tokens=32, every=4))
    for step in range(3):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        handle.state_dict(tensors=False)  # the first waits for the first measurement
    with Operations() as operations:
        plain = handle.state_dict(tensors=False)
    state = handle.state_dict()
    assert state.pop("forces") and plain == state and not operations.count
