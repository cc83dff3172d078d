"""Gradients with repulsion between logits, against the reference implementation."""

import pytest
import torch

from repulsive import SVGD, repel
from repulsive.particles import CosineLadder
from tests.repulsion.logits.changed_models import CHANGED, clipped
from tests.repulsion.logits.models import CASES, Case
from tests.repulsion.logits.oracle import energy, expected_gradients

ALL = 10_000  # more than a batch has, so that all tokens are sampled


@pytest.mark.parametrize("name", [*CASES, *CHANGED])
@pytest.mark.parametrize("kernel", ["rbf", "cosine"])
def test_gradients_match_the_reference(name: str, kernel: str) -> None:
    torch.manual_seed(0)
    case = (CASES | CHANGED)[name]()
    received = received_by(case, SVGD(stepsize=0.3, alpha=0.7, kernel=kernel, space="logits", tokens=ALL))
    heads = len(case.reads)
    expected = expected_of(case, kernel, 0.3 * 0.7 / heads)
    largest = max(float(other.norm()) for other in expected)
    for label, one, other in zip(case.parameters, received, expected, strict=True):
        # Centred keys make the force on a key's bias zero, up to rounding.
        scale = largest if label == "key.bias" else float(other.norm())
        assert scale > 0, label
        assert float((one - other).norm()) <= 1e-10 * scale, label


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "llama", "olmo", "stablelm-norms", "torch"])
def test_gradients_of_compiled_models_match_the_reference(name: str) -> None:
    torch.manual_seed(0)
    case = (CASES | CHANGED)[name]()
    rule = SVGD(stepsize=0.3, alpha=0.7, space="logits", tokens=ALL)
    received = received_by(case, rule, is_compiled=True)
    expected = expected_of(case, "rbf", 0.3 * 0.7 / len(case.reads))
    for label, one, other in zip(case.parameters, received, expected, strict=True):
        assert float((one - other).norm()) <= 1e-9 * float(other.norm()), label


def test_cosine_ladder_is_the_mean_cosine() -> None:
    torch.manual_seed(0)
    case = CASES["bert"]()
    rule = CosineLadder(stepsize=1.0, alpha=0.5, rung="regulariser", space="logits", tokens=ALL)
    for one, other in zip(received_by(case, rule), expected_of(case, "cosine", 0.5 / 3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "deberta", "olmo", "own"])
def test_value_output_circuits_match_the_reference(name: str) -> None:
    torch.manual_seed(0)
    case = (CASES | CHANGED)[name]()
    value, out, parts = VALUES[name](case)
    heads = len(case.reads)
    rule = SVGD(stepsize=0.3, alpha=0.7, kernel="cosine", space="logits", circuits="qk+ov", tokens=ALL)
    received_by(case, rule)
    inputs: list[torch.Tensor] = []
    hook = case.query_module.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    case.call()
    hook.remove()
    valid = torch.ones(inputs[0].shape[:2], dtype=torch.bool) if case.valid_q is None else case.valid_q
    v, w = value(inputs[0])[valid], out()  # [N, K, d], [D, M, d]
    vectors = [torch.stack([w[:, i] @ x[case.reads[i]] for x in v]).flatten() for i in range(heads)]
    scaled = 0.3 * 0.7 / heads * energy(vectors, "cosine")
    expected = torch.autograd.grad(scaled, parts)
    for parameter, other in zip(parts, expected, strict=True):
        rows = other != 0  # the q and k rows of a packed weight have other forces
        assert rows.any()
        torch.testing.assert_close(parameter.grad[rows], other[rows], rtol=1e-9, atol=1e-15)


def _bert_values(case: Case):
    output = case.model.encoder.layer[1].attention.output.dense
    value = case.attention.value
    with torch.no_grad():
        value.bias.normal_()
    return (
        lambda x: value(x).unflatten(-1, (3, 4)),
        lambda: output.weight.unflatten(1, (3, 4)),
        [value.weight, value.bias, output.weight],
    )


def _llama_values(case: Case):
    a = case.attention
    return (
        lambda x: a.v_proj(x).unflatten(-1, (2, 4)),
        lambda: a.o_proj.weight.unflatten(1, (4, 4)),
        [a.v_proj.weight, a.o_proj.weight],
    )


def _gpt2_values(case: Case):
    a = case.attention
    return (
        lambda x: a.c_attn(x)[..., 24:].unflatten(-1, (3, 4)),
        lambda: a.c_proj.weight.T.unflatten(1, (3, 4)),
        [a.c_attn.weight, a.c_proj.weight],
    )


def _deberta_values(case: Case):
    a = case.attention
    output = case.model.encoder.layer[1].attention.output.dense
    return (
        lambda x: a.in_proj(x).unflatten(-1, (3, 3, 4))[..., 2, :] + a.v_bias.view(3, 4),
        lambda: output.weight.unflatten(1, (3, 4)),
        [a.in_proj.weight, a.v_bias, output.weight],
    )


def _olmo_values(case: Case):
    a = case.attention
    return (
        lambda x: clipped(a.v_proj(x)),
        lambda: a.o_proj.weight.unflatten(1, (3, 4)),
        [a.v_proj.weight, a.o_proj.weight],
    )


def _own_values(case: Case):
    a = case.attention
    return (
        lambda x: a.vals(x).unflatten(-1, (2, 3)),
        lambda: a.mix.weight.unflatten(1, (4, 3)),
        [a.vals.weight, a.vals.bias, a.mix.weight],
    )


VALUES = {
    "bert": _bert_values,
    "llama": _llama_values,
    "gpt2": _gpt2_values,
    "deberta": _deberta_values,
    "olmo": _olmo_values,
    "own": _own_values,
}


def test_gradients_of_values_are_unchanged() -> None:
    torch.manual_seed(0)
    case = CASES["bert"]()
    case.model.train()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1e-30)
    case.call().square().sum().backward()
    before = {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None}
    for p in case.model.parameters():
        p.grad = None
    repel(case.model, optimizer, SVGD(space="logits", tokens=ALL), verbose=False)
    case.call().square().sum().backward()
    optimizer.step()
    for n, p in case.model.named_parameters():
        if p.grad is not None and not (".query." in n or ".key." in n):
            assert torch.equal(p.grad, before[n]), n
    assert not torch.equal(case.attention.query.weight.grad, before["encoder.layer.1.attention.self.query.weight"])


def received_by(case: Case, rule: SVGD, is_compiled: bool = False) -> list[torch.Tensor]:
    """Gradients after a step with a loss of zero: the force alone."""
    model = case.model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)  # weights stay; lr=0 would not count as a step
    handle = repel(model, optimizer, rule, match=case.match, example_inputs=case.example_inputs, verbose=False)
    call = torch.compile(case.call, backend="aot_eager") if is_compiled else case.call
    (call() * 0).sum().backward()
    optimizer.step()
    assert handle._logits.sampler.is_compiled is is_compiled
    handle.remove()
    return [case.attention.get_parameter(name).grad for name in case.parameters]  # type: ignore[misc]


def expected_of(case: Case, kernel: str, factor: float) -> list[torch.Tensor]:
    """Gradients by the reference, from the captured inputs of the projections."""
    inputs: dict[str, torch.Tensor] = {}

    def keep(part: str, position: int):
        def hook(module, args, kwargs, output):
            given = args[position] if len(args) > position else kwargs["key" if position else "query"]
            inputs.setdefault(part, given.detach())  # DeBERTa v3 projects relative positions afterwards

        return hook

    torch_attention = isinstance(case.query_module, torch.nn.MultiheadAttention)
    hooks = [
        case.query_module.register_forward_hook(keep("q", 0), with_kwargs=True),
        case.key_module.register_forward_hook(keep("k", 1 if torch_attention else 0), with_kwargs=True),
    ]
    case.call()
    for hook in hooks:
        hook.remove()

    def project():
        q, k = case.queries(inputs["q"]), case.keys(inputs["k"])
        valid_q = torch.ones(q.shape[:2], dtype=torch.bool) if case.valid_q is None else case.valid_q
        valid_k = torch.ones(k.shape[:2], dtype=torch.bool) if case.valid_k is None else case.valid_k
        return q, k, case.reads, valid_q, valid_k

    return expected_gradients(project, [case.attention.get_parameter(n) for n in case.parameters], kernel, factor)
