"""The laboratory: the paper's systems, data, recipes and tables. Nothing in the library imports it."""
