"""Language modelling with a decoder-only Transformer."""
