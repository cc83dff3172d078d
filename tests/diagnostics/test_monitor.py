"""Monitor: measurement steps, logged values, and one warning per layer."""

import warnings

import pytest
import torch
from torch import nn

from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.monitor import Monitor
from repulsive.diagnostics.similarity import of_weights
from repulsive.errors import NoHeadsFound, SelectionError
from repulsive.heads import find_heads
from tests.heads.zoo import build


def duplicated():
    """Two layers of four heads; the heads of the second have equal weights up to small noise."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with torch.no_grad():
        weight = model.layers[1].self_attn.in_proj_weight  # [48, 16]
        weight.copy_(weight[:4].repeat(12, 1) + 1e-3 * torch.randn(48, 16))
    return model


def test_it_measures_at_intervals_and_logs_the_similarity():
    model, _ = build("bert, sdpa")
    logged = []
    monitor = Monitor(model, lambda *entry: logged.append(entry), every=3)
    returned = [len(monitor.step()) for _ in range(7)]
    assert returned == [6, 0, 0, 6, 0, 0, 6]
    assert sorted({step for _, _, step in logged}) == [0, 3, 6]
    wanted = {}
    for d in of_weights(find_heads(model)):
        wanted[f"heads/weights/{d.name}/cosine"] = d.mean_cosine
        wanted[f"heads/weights/{d.name}/distance"] = d.mean_distance
        wanted[f"heads/weights/{d.name}/effective"] = d.effective_heads
    assert {name: value for name, value, step in logged if step == 3} == pytest.approx(wanted)
    assert monitor.step(12) and not monitor.step(13)
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight.normal_(std=5)
    monitor.measure(20)
    again = {name: value for name, value, step in logged if step == 20}
    assert again["heads/weights/encoder.layer.0.attention.self.q/cosine"] != pytest.approx(
        wanted["heads/weights/encoder.layer.0.attention.self.q/cosine"]
    )


def test_it_warns_once_for_each_layer_with_similar_heads():
    monitor = Monitor(duplicated(), lambda *_: None, every=1)
    with pytest.warns(UserWarning, match="too similar in weights") as caught:
        monitor.step()
    assert len(caught) == 3 and all("layers.1" in str(w.message) for w in caught)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.step()


def test_an_example_adds_attention_and_outputs():
    model, inputs = build("gpt-neox, sdpa")
    model.train()
    logged = {}
    Monitor(model, lambda name, value, _: logged.update({name: value}), example=inputs, threshold=2).step()
    assert model.training
    layer = capture(model, inputs).layers[1]
    for space in ("attention", "outputs"):
        name = f"heads/{space}/layers.1.attention"
        assert logged[f"{name}/cosine"] == pytest.approx(layer.diversity(space).mean_cosine)
        assert logged[f"{name}/effective"] == pytest.approx(layer.diversity(space).effective_heads)
    assert logged["heads/outputs/layers.1.attention/tokens"] == pytest.approx(layer.diversity("outputs").tokens)
    logits = circuit_similarity(model, [inputs]).logits
    assert logged["heads/logit_similarity"] == pytest.approx((logits[0].mean + logits[1].mean) / 2)
    assert logged["heads/logit_similarity_largest"] == max(each.largest for each in logits)
    one = {}
    picked = Monitor(model, lambda n, v, _: one.update({n: v}), example=inputs, match="layers.1.*.q", attention=False)
    picked.step()
    assert set(one) == {
        f"heads/{of}/{what}"
        for what in ("cosine", "distance", "effective")
        for of in ("weights/layers.1.attention.q", "outputs/layers.1.attention")
    } | {"heads/outputs/layers.1.attention/tokens", "heads/logit_similarity", "heads/logit_similarity_largest"}
    assert one["heads/logit_similarity"] == pytest.approx(logits[1].mean)  # of the layer that was picked


def test_attention_without_queries_and_keys_has_no_logits_to_log():
    model, inputs = build("additive")
    logged = []
    Monitor(model, lambda name, *_: logged.append(name), example=inputs, threshold=2, attention=False).step()
    assert any(name.startswith("heads/outputs") for name in logged) and not any("logit" in name for name in logged)


def test_one_warning_if_logits_cannot_be_recorded():
    model, inputs = build("bert, sdpa")
    for layer in model.encoder.layer:  # as DeBERTa has it
        layer.attention.self.q_bias = nn.Parameter(torch.zeros(32))
    logged = []
    monitor = Monitor(model, lambda name, *_: logged.append(name), every=1, example=inputs, threshold=2)
    with pytest.warns(UserWarning, match="logit_similarity is not logged: .*adds q_bias outside") as caught:
        [monitor.step() for _ in range(2)]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert any("outputs" in name for name in logged) and not any("logit" in name for name in logged)


def test_it_writes_to_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, _ = build("torch packed")
    with SummaryWriter(tmp_path) as writer:
        Monitor(model, writer).step(200)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (entry,) = events.Scalars("heads/weights/q/cosine")
    assert (entry.step, entry.value) == (200, pytest.approx(of_weights(find_heads(model))[0].mean_cosine))


def test_a_single_kv_head_is_neither_logged_nor_warned_about():
    model, _ = build("qwen2, sdpa")
    logged = []
    Monitor(model, lambda name, *_: logged.append(name)).step()
    assert {name.split(".")[-1] for name in logged} == {"q/cosine", "q/distance", "q/effective"}


def test_wrong_settings():
    model, _ = build("torch packed")
    with pytest.raises(SelectionError, match="every=0"):
        Monitor(model, print, every=0)
    with pytest.raises(SelectionError, match="SummaryWriter"):
        Monitor(model, "runs")
    with pytest.raises(NoHeadsFound):
        Monitor(nn.Linear(2, 2), print)


def test_padding_of_the_example_does_not_count():
    model, _ = build("bert, sdpa")
    given, mask = torch.randint(3, 30, (2, 7)), torch.tensor([[1] * 7, [1] * 2 + [0] * 5])
    example = {"input_ids": given, "attention_mask": mask}
    found = Monitor(model, lambda *entry: None, example=example, threshold=1).step()
    layer = capture(model, example).layers[0]
    for space in ("outputs", "attention"):
        mine = next(d for d in found if d.space == space)
        assert torch.equal(mine.distance, layer.diversity(space, mask.bool()).distance)
        assert not torch.equal(mine.distance, layer.diversity(space).distance)
