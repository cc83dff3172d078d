"""Repulsion in the training loops of transformers, Lightning and Accelerate."""
