"""Benchmarks of `repulsive bench`: the cost of repulsion on this machine.

`report` measures the paper's Transformer-small (`steps`, `update`, `growth`); `model_cost` measures models of
transformers (`presets`, `training_variants`, `turns`), and `model_table` prints the result.
"""
