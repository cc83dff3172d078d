"""Recipes of GLUE: learning rates by depth, the settings of ELECTRA, and mistakes."""

import pytest

from repulsive.errors import ConfigError
from repulsive.lab.engine import methods
from repulsive.lab.systems.glue.model import FineTuned, make_encoder
from repulsive.lab.systems.registry import make_task, open_recipe
from tests.lab.systems.glue import toy_glue
from tests.lab.systems.glue.toy_glue import task_and_model
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.mark.parametrize(("counted", "top"), [("paper", 1), ("released", 2)])
def test_learning_rates_fall_with_depth(counted, top, data):
    """0.8 to the number of layers above, counted as the paper or as the code does; 0.64 and 0.044 of recipes' notes."""
    task, model = task_and_model(data, "cola", "rates.layer_decay=0.8", f"rates.counted={counted}", "model.head=dense")
    factors = task.rate_factors(model)
    assert factors.keys() == dict(model.named_parameters()).keys()
    expected = {
        "out.weight": 1.0,
        "dense.bias": 1.0,
        "encoder.encoder.layer.1.attention.self.query.weight": 0.8**top,
        "encoder.encoder.layer.0.output.LayerNorm.bias": 0.8 ** (top + 1),
        "encoder.embeddings.word_embeddings.weight": 0.8 ** (top + 2),
        "encoder.embeddings_project.weight": 0.8 ** (top + 2),
    }
    for name, factor in expected.items():
        assert factors[name] == pytest.approx(factor), name
    assert len(set(factors.values())) == 4
    settings = open_recipe("glue/cola").optimizer
    optimizer = methods.make_optimizer(settings, model, factors)
    methods.set_rate(optimizer, 3e-4)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(factors)
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(3e-4 * factors[name])


def test_twelve_layers_as_published(data):
    """ELECTRA-small by the official code: x0.64 at the top, x0.044 for embeddings."""
    task, _ = task_and_model(data, "cola", "rates.layer_decay=0.8")
    model = FineTuned(make_encoder("small", 40), 2)
    factors = task.rate_factors(model)
    assert factors["encoder.encoder.layer.11.intermediate.dense.weight"] == pytest.approx(0.64)
    assert factors["encoder.embeddings.LayerNorm.weight"] == pytest.approx(0.8**14)
    assert round(0.8**14, 3) == 0.044 and factors["out.bias"] == 1.0


def test_the_recipe_is_electras():
    recipe, optimizer = open_recipe("glue/cola"), open_recipe("glue/cola").optimizer
    assert (optimizer.lr, optimizer.weight_decay, recipe.training.batch, recipe.training.epochs) == (3e-4, 0.0, 32, 3)
    assert [open_recipe(f"glue/{name}").training.epochs for name in ("sts", "rte")] == [10, 10]
    assert optimizer.clip * 32 == 1.0 and optimizer.eps * 32 == pytest.approx(1e-6)  # of a sum over 32 rows
    total = 1000
    rates = [methods.rate_at(step, optimizer, total) / optimizer.lr for step in range(total)]
    assert rates == pytest.approx([min(1, (step + 1) / 100) * (1 - step / total) for step in range(total)])
    assert not optimizer.bias_correction and optimizer.decay == "matrices"
    assert recipe.training.average == 1  # the last weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.task=wnli", "GLUE task 'wnli' is unknown"),
        ("rates.layer_decay=0", "layer_decay=0.0 must be above 0"),
        ("rates.counted=mine", "must be one of paper, released"),
        ("model.size=large", "must be one of tiny, small, base"),
        ("model.dropout=1", "dropout=1.0"),
        ("method.penalty=1.0", "no regularizer"),
        ("training.compile=true", "many shapes"),
        ("optimizer.warmup_share=1.0", "warmup_share=1.0"),
    ],
)
def test_mistakes_in_a_recipe(change, message, data):
    with pytest.raises(ConfigError, match=message):
        toy_glue.recipe(data, "rte", change)


def test_data_of_another_task(data):
    with pytest.raises(ConfigError, match="holds GLUE task 'cola', and the recipe is for GLUE task 'rte'"):
        make_task(toy_glue.recipe(data, "rte", f"data.folder={data / 'cola'}"))
    with pytest.raises(ConfigError, match="single texts, nothing to swap"):
        make_task(toy_glue.recipe(data, "cola", "data.swapped=true"))
