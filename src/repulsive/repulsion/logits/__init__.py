"""Repulsion between attention logits: which projections form them, tokens to evaluate them on, the force on weights."""
