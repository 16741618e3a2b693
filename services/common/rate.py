"""How often something may happen."""


class RateLimit:
    """Allows so many events in each second of the clock that `take` is told."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._began_s = float("-inf")
        self._taken = 0

    def take(self, now_s: float) -> bool:
        """Whether one more may happen now; it then counts."""
        if now_s - self._began_s >= 1.0:
            self._began_s, self._taken = now_s, 0
        if self._taken >= self._per_second:
            return False
        self._taken += 1
        return True
