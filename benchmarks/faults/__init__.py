"""Fault injection during change-overs, and the fate of the requests."""
