"""The only place that reads time."""

import time


def monotonic_s() -> float:
    """Seconds on a clock that never goes back; only differences mean anything."""
    return time.monotonic()


def process_s() -> float:
    """Processor time of this process; only differences mean anything."""
    return time.process_time()


def unix_s() -> int:
    """Seconds since 1970, for timestamps that clients see."""
    return int(time.time())
