"""Triton kernels for NVIDIA GPUs; torch's CUDA build includes Triton.

They take any float type of 16 or 32 bits and accumulate in float32. Importing a kernel requires
Triton, so modules import kernels only where they use them. `TRITON_INTERPRET=1` runs them on a CPU,
for tests.
"""
