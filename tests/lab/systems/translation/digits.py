"""A translation that is learned in seconds: numbers from German into English."""

from repulsive.lab.systems.datasets import prepare
from tests.lab.systems import running
from tests.lab.systems.translation.parallel_files import write_pairs

RECIPE = """
task = "translation"
label = "{label}"
data.folder = "{data}"
model = {{ width = 32, heads = 4, depth = [1, 1], feed_forward = 64, dropout = 0.1 }}
optimizer = {{ lr = 5e-3, betas = [0.9, 0.98], schedule = "inverse-sqrt", warmup = 40 }}
training = {{ epochs = 3, batch = 512, log_every = 5, average = 2 }}
search = {{ beam = 2, longest = 30 }}
"""

_TOY = running.ToyRecipe("digits.toml")
toml, recipe, loop, train = _TOY.path, _TOY.open, _TOY.loop, _TOY.train


def make_data(folder, size=400, **also):
    """Prepared numbers and a recipe; `also` are further test sets by name, each the raw files of a part."""
    raw = write_pairs(folder / "raw", sizes=(size, 20, 20), longest=5)
    further = {name: raw / part for name, part in also.items()}
    prepare("translation", raw, folder / "prepared", jobs=1, most=120, also=further)
    toml(folder).write_text(RECIPE.format(data=folder / "prepared", label="digits"))
    return folder
