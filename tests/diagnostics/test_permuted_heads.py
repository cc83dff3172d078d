"""Permuted heads: similarity between layers against brute force, draws, and verdicts of constructed models."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from repulsive import Heads
from repulsive.diagnostics.circuits import Similarity
from repulsive.diagnostics.cka import cka_of_grams, cka_without_groups
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.model_heads import SPACES, Space
from repulsive.diagnostics.permuted_heads import (
    LayerHeads,
    Permuted,
    draw_heads,
    evenly_spaced,
    groups_of_layers,
    permuted_heads,
)
from repulsive.diagnostics.summary import as_json, as_text
from repulsive.diagnostics.untrained_baseline import Compared
from repulsive.pages.inspection_page import render_inspection
from tests.diagnostics.test_similarity_nulls import bert, change, text

transformers = pytest.importorskip("transformers")

TOKENS = {"input_ids": torch.randint(5, 60, (3, 7), generator=torch.Generator().manual_seed(3))}


def small_bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=64
    )
    return transformers.BertModel(config).double().eval()


def small_qwen() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        vocab_size=64,
    )
    model = transformers.Qwen2Model(config).double().eval()
    for layer in model.layers:
        nn.init.normal_(layer.self_attn.k_proj.bias)
    return model


def projections(model: nn.Module, names: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """Record the results of the q, k and v projections of every layer by hooks of our own."""
    layers = [module for module in model.modules() if all(hasattr(module, name) for name in names)]
    results: list[dict[str, Tensor]] = [{} for _ in layers]
    hooks = [
        getattr(layer, name).register_forward_hook(
            lambda _m, _a, out, own=own, name=name: own.__setitem__(name, out.detach())
        )
        for layer, own in zip(layers, results, strict=True)
        for name in names
    ]
    with torch.no_grad():
        model(**TOKENS)
    for hook in hooks:
        hook.remove()
    return results


def circuit_vectors(model: nn.Module, space: Space) -> list[list[Tensor]]:
    """Compute the function of every head over tokens, one vector per layer and head."""
    is_bert = isinstance(model, transformers.BertModel)
    names = ("query", "key", "value") if is_bert else ("q_proj", "k_proj", "v_proj")
    result = []
    for number, own in enumerate(projections(model, names)):
        q, k, v = (own[name] for name in names)  # [B, T, features]
        block = model.encoder.layer[number].attention.output.dense if is_bert else model.layers[number].self_attn.o_proj
        vectors = []
        for head in range(2 if is_bert else 4):
            mine = slice(8 * head, 8 * head + 8) if is_bert else slice(4 * head, 4 * head + 4)
            shared = mine if is_bert else slice(4 * (head // 2), 4 * (head // 2) + 4)
            keys = (k - k.mean(1, keepdim=True))[..., shared].flatten(0, 1)
            if space == "logits":
                vectors.append((q[..., mine].flatten(0, 1) @ keys.T).flatten())
            else:
                vectors.append((v[..., shared].flatten(0, 1) @ block.weight[:, mine].T).flatten().detach())
        result.append(vectors)
    return result


def oracle(model: nn.Module, space: Space) -> list[list[Tensor]]:
    """Compute one vector per layer and head whose inner products are the similarities."""
    if space in ("logits", "ov"):
        return [[x / x.norm() for x in layer] for layer in circuit_vectors(model, space)]
    heads = Heads(model)
    if space == "attention":
        result = []
        for weights in heads.attention(TOKENS):
            vectors: list[list[Tensor]] = [[] for _ in range(weights.shape[1])]
            for item, query in itertools.product(range(3), range(7)):
                keys = 7 if isinstance(model, transformers.BertModel) else query + 1
                for head in range(len(vectors)):
                    row = weights[item, head, query, :keys] - 1 / keys
                    if keys > 1:
                        vectors[head].append(torch.cat([row / row.norm(), row.new_zeros(7 - keys)]))
            result.append([torch.cat(own) / len(own) ** 0.5 for own in vectors])
        return result
    result = []
    for outputs in heads.outputs(TOKENS):
        vectors = []
        for head in range(outputs.shape[2]):
            x = outputs[:, :, head].flatten(0, 1)  # [N, d_model]
            if space == "cka":
                x = x - x.mean(0)
                gram = x @ x.T
                vectors.append((gram / gram.norm()).flatten())
            else:
                vectors.append((x / x.norm(dim=-1, keepdim=True)).flatten() / len(x) ** 0.5)
        result.append(vectors)
    return result


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("build", [small_bert, small_qwen])
def test_draws_agree_with_brute_force(build, space: Space) -> None:
    """A draw takes two heads of different layers; with grouped heads, two key-value heads with all of their queries."""
    model = build()
    vectors = oracle(model, space)
    size = len(vectors[0]) // 2
    units = [[(layer, head) for head in range(k * size, (k + 1) * size)] for layer in range(3) for k in range(2)]

    def mean(heads: list[tuple[int, int]]) -> float:
        pairs = [float(vectors[a][i] @ vectors[b][j]) for (a, i), (b, j) in itertools.combinations(heads, 2)]
        return sum(pairs) / len(pairs)

    expected = sorted(mean([*a, *b]) for a, b in itertools.combinations(units, 2) if a[0][0] != b[0][0])
    for row, layer in enumerate(Heads(model).similarity([TOKENS], space, twins=0)):
        assert layer.permuted is not None and layer.permuted.layers == 3
        drawn = sorted({round(value, 11) for value in layer.permuted.means})
        assert len(drawn) == 12 and drawn == pytest.approx(expected, abs=1e-10)
        assert layer.permuted.mean == pytest.approx(layer.mean, abs=1e-10)  # all tokens are sampled
        assert layer.permuted.mean == pytest.approx(mean([(row, head) for head in range(2 * size)]), abs=1e-10)
        assert len(layer.permuted.largests) == 200 and max(layer.permuted.largests) >= max(layer.permuted.means)


def test_draws_take_one_head_per_layer_if_there_are_enough_layers() -> None:
    counts = [3, 2, 4, 3, 3]
    layer_of = torch.arange(5).repeat_interleave(torch.tensor(counts))
    chosen = draw_heads(counts, 4, 3000, torch.Generator().manual_seed(0))
    assert all(len(set(layer_of[draw].tolist())) == 4 for draw in chosen)
    shares = Counter(chosen.flatten().tolist())
    for head, layer in enumerate(layer_of.tolist()):  # each layer gives 4 / 5 heads per draw
        assert shares[head] / 3000 == pytest.approx(0.8 / counts[layer], abs=0.04)


def test_draws_from_fewer_layers_than_heads_count_pairs_of_different_layers_only() -> None:
    chosen = draw_heads([4, 4], 4, 50, torch.Generator().manual_seed(0))
    for draw in chosen.tolist():
        assert len(set(draw)) == 4 and sum(head < 4 for head in draw) == 2
    same, other = torch.full((4, 4), 0.9), torch.full((4, 4), 0.1)
    similarity = torch.cat([torch.cat([same, other]), torch.cat([other, same])], 1)
    first, _ = permuted_heads(similarity.double(), [4, 4], draws=20)
    assert first.mean == pytest.approx(0.9) and first.means == pytest.approx([0.1] * 20) and first.largests == ()


def test_query_heads_of_a_key_value_head_stay_together() -> None:
    """Heads that share a key-value head have cosine 0.8, others 0: every draw has as many such pairs as a layer."""
    serves = (0, 1, 0, 1)
    shared = torch.tensor([[float(a == b) for a in serves] for b in serves]) * 0.8
    similarity = torch.block_diag(shared, shared, shared).double()
    for each in permuted_heads(similarity, [4, 4, 4], draws=20, serves=serves):
        assert each.means == pytest.approx([each.mean] * 20) and each.largests == pytest.approx([0.8] * 20)
    few = permuted_heads(torch.block_diag(*[shared] * 2).double(), [4, 4], draws=20, serves=serves)[0]
    assert few.means == pytest.approx([few.mean] * 20)
    alone = permuted_heads(similarity, [4, 4, 4], draws=20)[0]
    assert alone.mean == pytest.approx(1.6 / 6) and max(alone.means) == 0


def test_a_layer_is_scored_like_its_draws() -> None:
    """If it does not matter in which layer a head sits, about 1 of 370 layers lies outside three deviations."""
    generator, outside = torch.Generator().manual_seed(0), 0
    for seed in range(20):
        heads = torch.nn.functional.normalize(torch.randn(48, 6, generator=generator, dtype=torch.float64), dim=-1)
        for each in permuted_heads(heads @ heads.T, [4] * 12, seed=seed):
            values = torch.tensor(each.means)
            outside += abs(each.mean - float(values.mean())) > 3 * float(values.std())
    assert outside <= 6  # of 240 layers


@pytest.mark.parametrize("space", SPACES)
def test_duplicates_in_one_layer_are_more_alike_than_permuted_heads(space: Space) -> None:
    table = Heads(change(bert(), (1, 1, 1, 1))).similarity([text(), text(seed=1)], space, twins=0)
    assert table.permuted_verdicts[0] == "more alike than chance" and table.verdicts[0] == "cannot say"
    assert "permuted heads" in repr(table) and "more alike than chance" in repr(table)


@pytest.mark.parametrize("space", ["logits", "ov"])
def test_opposite_heads_are_more_different_than_permuted_heads(space: Space) -> None:
    table = Heads(change(bert(), (1, -1, 3, -3))).similarity([text(), text(seed=1)], space, twins=0)
    assert table.permuted_verdicts[0] == "more different than chance"


def test_the_interval_moves_with_the_value_on_fewer_tokens() -> None:
    """The layer has 0.5 on all tokens and 0.9 on those of the draws: 0.9 is compared, with the interval of 0.5."""
    cosine = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    left_out = torch.stack([cosine, cosine])
    own = Permuted(0.9, 0.9, (0.6, 0.7, 0.8), (0.6, 0.7, 0.8), 3)  # chance: 0.4 to 1.0
    assert Compared(Similarity("", "ov", cosine, 9, left_out, own)).permuted_verdict == "as chance"
    low = Permuted(0.1, 0.1, (0.6, 0.7, 0.8), (), 3)
    compared = Compared(Similarity("", "ov", cosine, 9, left_out, low))
    assert compared.permuted_verdict == "more different than chance"
    assert compared.permuted_pair_verdict == compared.verdict == "cannot say"
    assert Compared(Similarity("", "ov", cosine, 9, left_out)).permuted_verdict == "cannot say"


@pytest.mark.parametrize("space", SPACES)
def test_one_layer_has_no_permuted_heads(space: Space) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64
    )
    table = Heads(transformers.BertModel(config).eval()).similarity([TOKENS], space, twins=0)
    assert table[0].permuted is None and table.permuted_verdicts == ["cannot say"]


def test_encoder_decoder_and_cross_attention_are_drawn_apart() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, d_kv=8, num_heads=2, num_layers=2, num_decoder_layers=3, d_ff=16, vocab_size=64
    )
    model = transformers.T5Model(config).eval()
    batch = {**TOKENS, "decoder_input_ids": TOKENS["input_ids"]}
    for space in SPACES:
        table = Heads(model, batch).similarity([batch], space, twins=0)
        assert [layer.permuted.layers for layer in table if layer.permuted] == [2, 2, 3, 3, 3, 3, 3, 3]


def test_windows_are_not_compared_between_layers() -> None:
    """Windows of Swin are shifted in every second layer, so that tokens of two layers do not correspond."""
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    model, batch = transformers.SwinModel(config).eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}
    for space in SPACES:
        table = Heads(model, batch).similarity([batch], space, twins=0)
        assert [layer.permuted is None for layer in table][:2] == [True, True]


def test_layers_of_another_width_or_sharing_are_not_comparable() -> None:
    def layer(name: str, width: int = 8, serves: tuple[int, ...] | None = None, stack: str = "encoder") -> LayerHeads:
        return LayerHeads(name, 4, 5, (stack,), lambda _: torch.zeros(4, width), width, serves)

    pairs, single = (0, 0, 1, 1), (0, 0, 0, 0)
    layers = [layer("a"), layer("b"), layer("c", 9), layer("d", serves=pairs), layer("e", serves=pairs)]
    layers += [layer("f", serves=single), layer("g", serves=single), layer("h", stack="decoder")]
    assert [[each.name for each in group] for group in groups_of_layers(layers)] == [["a", "b"], ["d", "e"]]


def test_evenly_spaced_tokens() -> None:
    assert evenly_spaced(3, 5).tolist() == [0, 1, 2]
    assert evenly_spaced(1000, 4).tolist() == [0, 333, 666, 999]


def test_cka_without_groups_agrees_with_leaving_tokens_out() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 11, 4, dtype=torch.float64, generator=generator) + 2
    x[2] = torch.where(torch.arange(11)[:, None] % 3 == 0, x[2], 1.0)  # constant without group 0
    grams, groups = x @ x.mT, torch.arange(11) % 3
    result = cka_without_groups(grams, groups, 3)
    for group in range(3):
        kept = groups != group
        torch.testing.assert_close(result[group], cka_of_grams(grams[:, kept][:, :, kept]), atol=1e-10, rtol=1e-10)
    assert float(result[0, 2, 0]) == 0 < float(result[1, 2, 0])
    assert cka_without_groups(grams, torch.zeros(11).long(), 1).isnan().all()


def test_the_inspection_has_verdicts_of_every_measure() -> None:
    inspection = inspect_heads(change(bert(), (1, 1, 1, 1)), [text(), text(seed=1)])
    numbers = as_json(inspection)["similarity"]
    assert list(numbers) == ["logits", "ov", "attention", "outputs", "cka"]
    out, page = as_text(inspection), render_inspection(inspection, title="Heads")
    for entries, title in zip(
        numbers.values(),
        ("attention logits", "value-output circuits", "attention maps", "outputs", "CKA of outputs"),
        strict=True,
    ):
        first, second = entries
        assert first["verdict"] == first["permuted"]["verdict"] == "more alike than chance" != second["verdict"]
        assert first["interval"][0] <= first["mean_cosine"] <= first["interval"][1]
        assert first["permuted"]["layers"] == 2 and first["permuted"]["draws"] == 200
        assert first["permuted"]["largest_cosine"] is None  # two layers of four heads
        assert first["permuted"]["largest_verdict"] == "cannot say"
        assert f"<h3>{title if 'CKA' in title else f'Similarity of {title}'}</h3>" in page
    assert out.count("permuted heads: ") == 5 and out.count("mean CKA") == 1 and page.count("<td>more alike</td>") >= 10
    assert page.count("Permuted heads are as many heads") == 1
