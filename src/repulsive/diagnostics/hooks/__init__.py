"""Capture attention and head outputs of any model, whatever backend it uses; ablate heads."""
