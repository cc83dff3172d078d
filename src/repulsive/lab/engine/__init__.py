"""One small training engine: recipes from TOML, checkpoints that survive anything, seeding."""
