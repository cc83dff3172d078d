"""Triton kernels of the fused update of heads. `eager` is the reference.

The update of a group of M heads of D elements is grad <- A grad + B theta + sigma xi, with two M x M matrices A and B
that depend on inner products of heads alone. It takes three launches:

- `gram.gram_kernel`: inner products of heads, partial sums over ranges of columns
- `solve.solve_kernel`: A and B from the inner products, and measurements
- `combine.combine_kernel`: the new gradients

`pack` has the two launches that a sharded update adds around its all-reduce. `slices`, `products` and
`noise` have the functions that Triton kernels share.

Every launch covers a whole table of slices. Particles and gradients are read in place, whatever their strides. Nothing
is stacked, and nothing waits for the host. An update reads the parameters twice, and reads and writes the gradients
once: these four passes are the minimum. A rule that holds a ratio, and a measurement, read the gradients once more.

From 16 heads on, matrix products run on tensor cores, as several TF32 products each (`products`). This is as accurate
as float32; TF32 alone is not. `column_gram` and `column_combine` do the same work for a dozen heads without tensor
cores (`columns`); `launch_settings.BY_COLUMN` says where they are used.

Names in Triton kernels: M is the number of heads, MP is M padded to a power of two. Several programs share a slice,
and each reads BLOCK columns at a time.
"""
