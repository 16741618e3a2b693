"""Triton kernels for NVIDIA GPUs; torch's CUDA build includes Triton.

The kernels take any float type of 16 or 32 bits and accumulate in float32. Importing a kernel
requires Triton, so modules that also run without a GPU import kernels only where they use them.
`TRITON_INTERPRET=1` runs kernels on a CPU, for tests.
"""
