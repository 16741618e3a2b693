"""Kernels for NVIDIA GPUs in Triton, which torch's build for CUDA brings along.

They take any float type of 16 or 32 bits, and add up in float32. To import one needs Triton, so
modules import them only where they use them. `TRITON_INTERPRET=1` runs them on a CPU, for tests.
"""
