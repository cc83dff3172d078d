"""Similarity of logits of models that change queries and keys after their projection, against loops over tokens."""

import pytest
import torch

from repulsive import SVGD, find_heads, repel
from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.errors import HeadLayoutError
from tests.repulsion.logits.changed_models import CHANGED
from tests.repulsion.logits.models import Case
from tests.repulsion.logits.oracle import functions


@pytest.mark.parametrize("name", CHANGED)
def test_similarities_equal_a_double_loop_over_tokens(name: str) -> None:
    torch.manual_seed(0)
    case = CHANGED[name]()
    groups = find_heads(case.model, case.example_inputs)
    result = circuit_similarity(case.model, [case.inputs], groups=groups)
    layer = next(name for name, module in case.model.named_modules() if module is case.attention)
    measured = next(each for each in result.logits if each.name == layer)
    torch.testing.assert_close(measured.cosine, expected_cosines(case), rtol=1e-6, atol=1e-6)


def test_training_and_inspection_measure_the_same() -> None:
    torch.manual_seed(0)
    case = CHANGED["deberta"]()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1e-30)
    handle = repel(case.model.train(), optimizer, SVGD("heads", space="logits", tokens=1000), verbose=False)
    case.call().sum().backward()
    optimizer.step()
    trained = {group.name.rpartition(".")[0]: group.similarity for group in handle.report()}
    inspected = circuit_similarity(case.model, [case.inputs]).logits
    assert trained == pytest.approx({each.name: each.mean for each in inspected}, abs=1e-6)


def test_a_bias_of_another_size_is_refused() -> None:
    case = CHANGED["deberta"]()
    case.attention.q_bias = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1e-3)
    with pytest.raises(HeadLayoutError, match=r"layer\.1\.attention\.self\.q_bias: expected a bias with 12 numbers"):
        repel(case.model, optimizer, SVGD("heads", space="logits"), verbose=False)


@torch.no_grad()
def expected_cosines(case: Case) -> torch.Tensor:
    inputs: dict[str, torch.Tensor] = {}

    def keep(part: str):
        def hook(module, args):
            inputs.setdefault(part, args[0])  # DeBERTa v3 projects relative positions afterwards

        return hook

    parts = {"q": case.query_module, "k": case.key_module}
    hooks = [module.register_forward_pre_hook(keep(part)) for part, module in parts.items()]
    case.model.eval()
    case.call()
    for hook in hooks:
        hook.remove()
    q, k = case.queries(inputs["q"]), case.keys(inputs["k"])
    everything = torch.ones(q.shape[:2], dtype=torch.bool)
    valid_q, valid_k = (everything if valid is None else valid for valid in (case.valid_q, case.valid_k))
    units = torch.stack([vector / vector.norm() for vector in functions(q, k, case.reads, valid_q, valid_k)])
    return units @ units.T
