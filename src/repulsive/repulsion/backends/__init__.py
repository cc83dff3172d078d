"""Backends that run the update of many groups: plain torch, or Triton kernels replayed as a CUDA graph."""
