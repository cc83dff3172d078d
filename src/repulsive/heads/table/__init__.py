"""Known attention classes as data, and how a model is matched against them."""
