"""The example with TransformerLens in the documents, and models of its version 4."""

import pytest
import torch

from repulsive import Heads
from tests.test_readme import ROOT, python_blocks


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_the_example_runs():
    pytest.importorskip("transformer_lens")
    (block,) = [b for b in python_blocks(ROOT / "docs" / "frameworks.md") if "transformer_lens" in b.text]
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    from repulsive import repel

    names = {"torch": torch, "repel": repel}
    exec(block.text, names)
    assert names["handle"].groups


def test_a_bridge_of_version_4():
    pytest.importorskip("transformer_lens")
    bridge = pytest.importorskip("transformer_lens.model_bridge").TransformerBridge
    if not hasattr(bridge, "boot_native"):
        pytest.skip("this version has no boot_native")
    from transformer_lens.config import TransformerBridgeConfig

    config = TransformerBridgeConfig(
        n_layers=2, d_model=32, n_ctx=16, d_head=8, n_heads=4, d_vocab=50, d_mlp=64, act_fn="gelu"
    )
    model, tokens = bridge.boot_native(config).eval(), torch.randint(50, (2, 9))
    heads = Heads(model, tokens)
    assert set(heads.proofs().values()) == {"proved"}
    with torch.no_grad(), heads.ablated([(0, 1)]):
        ablated = model(tokens)
    with torch.no_grad():
        heads.layers[0].module.weight[:, 8:16] = 0
        torch.testing.assert_close(ablated, model(tokens))
