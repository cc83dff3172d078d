"""Repulsion between attention logits: sample tokens, compute the force, add it to gradients."""
