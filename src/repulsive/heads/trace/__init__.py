"""Prove and infer heads by following gradients from attention calls back to projections.

`forward_pass` runs the model, `recorder` records its projections and attention calls, and `tracer` computes the
`gradients` of each head. `reports` checks claimed heads against them, and `infer` derives heads from them.
`sharded_weights` gathers weights that FSDP2 shards, before the model runs.
`output_projection` finds the matrix that is applied to the concatenated heads.
"""
