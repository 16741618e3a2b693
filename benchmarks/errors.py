"""Errors of a benchmark."""


class BenchError(Exception):
    """The measurement cannot be carried out as requested; the message names cause and remedy."""
