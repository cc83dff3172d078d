"""What the translation study measures: heads, attention, similarity of tokens, and pruning curves."""

import statistics

import pytest
import torch

from repulsive import HeadMonitor
from repulsive.heads import find_heads
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.translation.attention import Mask
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.lab.text.pieces import BOS
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.tokens import PAD
from tests.lab.systems.translation import digits
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("matplotlib")


def test_pruning_curves_are_compared_over_seeds(script):
    from studies.translation.redundancy import pruning_lines

    from repulsive.diagnostics.redundancy import Curve

    order = tuple((0, head) for head in range(4))
    curves = {
        "MA": {seed: Curve((0, 2, 4), (0.5, 0.45 + 0.01 * seed, 0.1), order) for seed in (0, 1)},
        "SVGD": {seed: Curve((0, 2, 4), (0.4, 0.37 + 0.01 * seed, 0.1), order) for seed in (0, 1)},
    }
    table, _, differences = pruning_lines(curves)
    assert table.splitlines()[2:] == ["| MA | 2 | -4.50 | -40.00 |", "| SVGD | 2 | -2.50 | -30.00 |"]
    assert differences.splitlines()[2] == ("| SVGD minus MA | 2 | +2.00 [+2.00, +2.00] | +10.00 [+10.00, +10.00] |")


def test_heads_are_measured_as_diagnostics_do(script):
    from studies.translation.measuring_task import measure_heads

    from repulsive.diagnostics.similarity import of_weights

    torch.manual_seed(0)
    groups = find_heads(Transformer(TransformerConfig(20, 16, 4, (1, 2), 16)))
    found = measure_heads(groups)
    cosines = [(each.cosine.sum() - each.cosine.trace()).item() / 12 for each in of_weights(groups)]
    assert found["cosine"] == pytest.approx(statistics.fmean(cosines), abs=1e-6)
    assert found["norm"] == pytest.approx(statistics.fmean(group.read().norm(dim=1).mean().item() for group in groups))
    assert set(measure_heads(find_heads(Transformer(TransformerConfig(20, 16, 1, (1, 1), 16))))) == {"norm"}


def test_attention_is_measured_as_the_model_computes_it(script, folder):
    """Entropy from the weights that the model returns; the largest logit of the encoder from its first layer."""
    from studies.translation.measuring_task import KINDS, measure_attention, probe_of

    part = Prepared.load(folder / "prepared").parts["dev"]
    source, before = probe_of(part)
    assert 1 <= len(source) == len(before) <= 16 and (source != PAD).all() and (before != PAD).all()
    assert (before[:, 0] == BOS).all() and before.shape[1] > 1
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(120, 16, 4, (1, 1), 16)).eval()
    found = measure_attention(HeadMonitor(model, every=1, probe=(source, before), items=16).measure())
    weights = model(source, before, collect="weights")[1]  # encoder, decoder, cross: [B, M, T, S] each
    entropies = [torch.special.entr(each).sum(-1).mean().item() for each in weights]
    assert [found[f"entropy/{kind}"] for kind in KINDS] == pytest.approx(entropies, rel=1e-4)
    assert found["entropy"] == pytest.approx(statistics.fmean(entropies), rel=1e-4)
    attention, x = model.encoder.layers[0].self_attention, model.embed(source)
    q, k = (project(x).unflatten(-1, (4, 4)).transpose(1, 2) for project in (attention.q_proj, attention.k_proj))
    largest = (q @ k.mT / 2).detach().amax((0, 2, 3)).mean()  # over sentences and pairs of tokens; mean over heads
    assert found["largest_logit/encoder"] == pytest.approx(float(largest), rel=1e-4)
    assert -1 <= found["similarity"] <= 1 and found["largest_logit"] > 0


def test_tokens_are_compared_after_the_whole_encoder(script):
    from studies.translation.measuring_task import measure_attention

    torch.manual_seed(0)
    model = Transformer(TransformerConfig(120, 16, 4, (2, 1), 16)).eval()
    source = torch.randint(4, 120, (3, 5))
    states = model.encoder(model.embed(source), Mask()).detach()
    cosines = [
        torch.cosine_similarity(tokens[i], tokens[j], dim=0) for tokens in states for i in range(5) for j in range(i)
    ]
    found = measure_attention(HeadMonitor(model, every=1, probe=(source, source)).measure())
    assert found["token_cosine"] == pytest.approx(float(torch.stack(cosines).mean()), rel=1e-4)


@pytest.mark.parametrize("packed", ["true", "false"])
def test_attention_is_logged_at_every_evaluation(script, folder, tmp_path, packed):
    from studies.translation.measuring_task import make_task

    recipe = digits.recipe(folder, f"packed={packed}", "training.batch=300", "training.epochs=2", "search.beam=1")
    run = RunFolder(tmp_path)
    Loop(make_task(recipe), recipe, run, Watcher(), "cpu").run()
    lines = [line for line in run.lines() if line["kind"] == "dev"]
    assert len(lines) == 2 and all(line["entropy"] > 0 and "largest_logit/cross" in line for line in lines)
    assert all(-1 <= line["token_cosine"] <= 1 for line in lines)
    assert lines[0]["entropy"] != lines[1]["entropy"]
    assert run.curve("dev", "largest_logit") == [(line["step"], line["largest_logit"]) for line in lines]
