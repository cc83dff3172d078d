"""Repulsion between attention logits: sample tokens, compute the force, add it to gradients.

`find_projections` pairs q and k, `sampler` keeps tokens of the forward pass (in compiled models called by `operators`),
`force` turns them into a force on weights, `repulsion` keeps forces until new ones are due, `writer` adds them to
gradients, and `update` runs these in an optimizer step.
"""
