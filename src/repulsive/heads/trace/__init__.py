"""Proof and inference of heads by autograd."""
