"""Toy graphs that are learned in seconds: who likes or makes what."""

from repulsive.lab.systems.graphs.prepare import plan_graphs
from repulsive.lab.systems.graphs.toy import write_graphs
from tests.lab.systems import running

RECIPE = """
task = "graphs"
label = "toy"
data.folder = "{data}"
model = {{ width = 32, heads = 4, layers = 2, lstm_layers = 1, dropout = 0.0, titles = false }}
optimizer = {{ name = "sgd", lr = 0.2, momentum = 0.9, clip = 1.0 }}
training = {{ epochs = 3, batch = 16, log_every = 5 }}
search = {{ beam = 2, longest = 40, at_once = 8 }}
"""

_TOY = running.ToyRecipe("toy.toml")
toml, recipe, train = _TOY.path, _TOY.open, _TOY.train


def make_data(folder):
    """Prepared graphs and a recipe."""
    raw = write_graphs(folder / "raw")
    plan_graphs(raw, folder / "prepared", tokenizer="regex", minimum=1).make()
    toml(folder).write_text(RECIPE.format(data=folder / "prepared"))
    return folder
