"""Kernels for processors, compiled when the model is loaded. Importing one takes half a second."""
