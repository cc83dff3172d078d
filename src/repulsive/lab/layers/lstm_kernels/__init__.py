"""A bidirectional LSTM over whole sentences: one Triton launch forward and one backward.

A program processes ROWS sentences in one direction, word by word, so programs never synchronise. Direction 0 reads
positions 0, 1, 2, ...; direction 1 reads each sentence from its last word to its first, then the padding. Tensors are
indexed by position in the sentence, [B, T, 2, ...], so nothing is reversed in memory. Units are padded to P, a multiple
of 32; padded units have zero weights and stay exactly zero in both passes.

The forward pass also computes the factors of the backward pass:

    dc += dh * open                                                 open = o (1 - tanh^2 c)
    di, df, dg, do = dc * slope_i, dc * slope_f, dc * slope_g, dh * slope_o
    dc *= f

`gates` [B, T, 2, 4P] holds the inputs of the gates i, f, g, o, and is overwritten by their slopes. `links`
[B, T, 2, 2P] holds open and f.

`held` keeps weights in shared memory and states in registers for the whole sentence. `streamed` supports any size:
weights are read again at every word, and states go through global memory, with a barrier. `cell` has the functions that
both call. Loops that read what they wrote have one pipeline stage: deeper ones would read it too early.
"""
