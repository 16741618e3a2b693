"""Errors of a benchmark, each one sentence for people.

BenchError          the request cannot be carried out: exit code 2
SystemUnavailable   a system could not run: the others go on, exit code 1 at the end
"""


class BenchError(Exception):
    """The request cannot be carried out; the message names cause and remedy."""


class SystemUnavailable(Exception):
    """One system cannot be installed, started or reached."""
