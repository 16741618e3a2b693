"""The only place that reads time."""

import time


def monotonic_s() -> float:
    """Seconds on a clock that never goes back; only differences mean anything."""
    return time.monotonic()


def cpu_s() -> float:
    """CPU seconds that this process has used, in all threads; other load hardly changes them."""
    return time.process_time()


def unix_s() -> int:
    """Seconds since 1970, for timestamps that clients see."""
    return int(time.time())


def unix_ns() -> int:
    """Nanoseconds since 1970, for what is compared with other machines' times."""
    return time.time_ns()
