"""Reads the clocks, so that no other module of the services does."""

import time


def monotonic_s() -> float:
    """Seconds on a monotonic clock with an arbitrary origin."""
    return time.monotonic()


def cpu_s() -> float:
    """CPU seconds used by all threads of this process; other processes hardly affect it."""
    return time.process_time()


def thread_cpu_s() -> float:
    """CPU seconds used by the calling thread."""
    return time.thread_time()


def unix_s() -> int:
    """Seconds since 1970, for timestamps that clients see."""
    return int(time.time())


def unix_ns() -> int:
    """Nanoseconds since 1970, comparable between machines with synchronised clocks."""
    return time.time_ns()
