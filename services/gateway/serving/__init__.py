"""The way of a request behind every door: prepare, generate, write."""
