"""Prove and infer heads by following gradients from attention calls back to projections."""
