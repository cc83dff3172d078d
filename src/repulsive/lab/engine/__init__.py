"""The training engine: recipes from TOML, the training loop, atomic checkpoints, run folders and sweeps."""
