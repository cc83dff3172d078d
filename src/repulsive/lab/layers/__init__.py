"""Building blocks of several systems' models: LSTM, packed attention, beam search, and their Triton kernels."""
