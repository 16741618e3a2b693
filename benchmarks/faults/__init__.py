"""Faults in the middle of change-overs, and what became of the requests."""
