"""The modules that contain attention layers: blocks, and the path from the model to the layers."""

from types import SimpleNamespace

from torch import nn

from repulsive.monitoring.layer_modules import blocks_of_layers, path_to_layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(1, 1)
        self.cross = nn.Linear(1, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(Block() for _ in range(2))


def layers(*names):
    return [SimpleNamespace(name=name) for name in names]


def test_a_block_is_an_entry_of_a_list_and_belongs_to_its_first_layer():
    modules = dict(Model().named_modules())
    names = ("encoder.layers.0.attention", "encoder.layers.0.cross", "encoder.layers.1.attention")
    blocks = blocks_of_layers(modules, layers(*names))
    assert [(layer.name, block) for layer, block in blocks] == [
        (names[0], modules["encoder.layers.0"]),
        (names[2], modules["encoder.layers.1"]),
    ]


def test_a_layer_outside_of_lists_is_its_own_block():
    block = Block()
    assert [found for _, found in blocks_of_layers(dict(block.named_modules()), layers("attention"))] == [
        block.attention
    ]


def test_the_path_ends_at_the_last_module_with_all_layers_and_skips_lists():
    modules = dict(Model().named_modules())
    both = ["encoder.layers.0.attention", "encoder.layers.1.attention"]
    assert path_to_layers(modules, both) == [modules[""], modules["encoder"]]
    one = [f"encoder.layers.1.{name}" for name in ("attention", "cross")]
    assert path_to_layers(modules, one) == [modules[""], modules["encoder"], modules["encoder.layers.1"]]
    assert path_to_layers(modules, [""]) == [modules[""]]
