"""Limits log lines about repeated events to a line per key and interval."""

from collections import Counter
from collections.abc import Callable, Hashable

from services.common.clock import monotonic_s

LOG_INTERVAL_S = 60.0
SUBJECTS_MAX = 64
"""Subjects per key that are counted apart; the others are counted together."""
SUBJECTS_SHOWN = 3


class LogLimiter:
    """The events since the last line of each key, by subject; keys must be few."""

    def __init__(self, now_s: Callable[[], float] = monotonic_s) -> None:
        self._now_s = now_s
        self._logged_s: dict[Hashable, float] = {}
        self._omitted: dict[Hashable, Counter[str]] = {}

    def due(self, key: Hashable, subject: str = "") -> str | None:
        """Count an event; return the omitted ones in words if a line is due, else None."""
        now_s = self._now_s()
        omitted = self._omitted.setdefault(key, Counter())
        if now_s - self._logged_s.get(key, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            known = subject in omitted or len(omitted) < SUBJECTS_MAX
            omitted[subject if known else "others"] += 1
            return None
        self._logged_s[key] = now_s
        del self._omitted[key]
        shown = [f"{count} of {name}" for name, count in omitted.most_common(SUBJECTS_SHOWN)]
        return f"{omitted.total()} ({', '.join(shown)})" if shown else "none"
