"""Errors of a benchmark."""


class BenchError(Exception):
    """The measurement cannot run as requested; the message names cause and remedy."""
