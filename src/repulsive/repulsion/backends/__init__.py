"""One update of many groups: eager, or fused Triton kernels replayed as a CUDA graph."""
