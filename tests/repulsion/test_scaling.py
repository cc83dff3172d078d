"""The costs in docs/scaling.md match its script, and the counts of the script match the code."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from repulsive import SVGD, repel
from repulsive.heads import heads_by_hand
from repulsive.repulsion.backends import eager
from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scaling():
    with study("studies.speed.scaling") as module:
        yield module


def test_the_document_holds_the_table_of_the_script(scaling):
    assert scaling.table() in (ROOT / "docs" / "scaling.md").read_text()


def test_the_constants_are_those_of_the_code(scaling):
    assert scaling.HELD == eager.MAX_MOVED
    assert f"{scaling.PLAIN} times over the weights" in " ".join((ROOT / "docs" / "scaling.md").read_text().split())


def test_known_costs(scaling):
    """Computed by hand: 96 triangles of 33 x 34 / 2 float64 products; 512 GPUs on a ring send nearly twice that."""
    model = scaling.MODELS[0]
    assert model.numbers == 3 * 32 * 4096**2
    assert model.products == 96 * 33 * 17 * 8
    assert scaling.columns(model, 512, 4).sent == pytest.approx(2 * model.products, rel=0.01)
    for shares in (2, 3):
        sent = scaling.rows(model, 512, 4, shares).sent
        assert sent == pytest.approx(shares * 4 * model.numbers / 512, rel=0.05)
    assert scaling.local(model, 8, 4) == pytest.approx(4 * 4 * model.numbers / 8 / 4.18e12)


class Touched(TorchDispatchMode):
    """Count bytes that operators read and write. Views count as zero; `copy_` does not read its target."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not view and func.__name__ != "_unsafe_view.default":
            read = args[1:] if func.__name__ == "copy_.default" else (args, kwargs)
            regions = {(t.data_ptr(), t.numel()): t for t in tree_leaves(read) if isinstance(t, torch.Tensor)}
            written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in (*regions.values(), *written))
        return out


def test_passes_of_the_plain_update(scaling):
    model = nn.ModuleDict({name: nn.Linear(512, 512, bias=False) for name in "ab"})
    groups = heads_by_hand(model, dict.fromkeys("ab", ("q", 32)))
    handle = repel(model, torch.optim.SGD(model.parameters(), lr=0.1), SVGD(), groups=groups, verbose=False)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    handle.apply()
    handle.steps = 1  # not a measured one
    with Touched() as touched:
        handle.apply()
    passes = touched.bytes / sum(p.numel() * p.element_size() for p in model.parameters())
    on_a_gpu = passes + 6  # there weights (twice) and gradients are stacked first, a read and a write each
    assert on_a_gpu == pytest.approx(scaling.PLAIN, abs=2)
