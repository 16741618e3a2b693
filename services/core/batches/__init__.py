"""Batches of requests in a file: their states, their order, and the fate of each line."""
