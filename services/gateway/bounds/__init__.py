"""Limits of the gateway: concurrency, memory, time, and the early end of requests."""
