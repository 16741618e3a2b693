"""Ids that are remembered for a while, in bounded memory."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The entries added in the last `keep_s` seconds, at most `count_max`.

    Entries are kept in two halves, and the older half is dropped as a whole. So an entry may stay
    for twice `keep_s`, and goes earlier only if `count_max` / 2 entries are added within `keep_s`.
    """

    def __init__(self, keep_s: float, count_max: int) -> None:
        self._keep_s = keep_s
        self._half_max = max(1, count_max // 2)
        self._newer: dict[K, V] = {}
        self._older: dict[K, V] = {}
        self._since_s: float | None = None  # from when on the newer half is filled

    def __len__(self) -> int:
        return len(self._newer) + sum(key not in self._newer for key in self._older)

    def __contains__(self, key: object) -> bool:
        return key in self._newer or key in self._older

    def get(self, key: K) -> V | None:
        """The value of a key; None if it is not remembered."""
        value = self._newer.get(key)
        return self._older.get(key) if value is None else value

    def add(self, key: K, value: V) -> None:
        """Remember a key from now on, with a value that is not None."""
        self._newer[key] = value
        if len(self._newer) >= self._half_max:
            self._turn()

    def expire(self, now_s: float) -> None:
        """Drop entries that are old enough; call it repeatedly."""
        if self._since_s is None:
            self._since_s = now_s
        elif now_s >= self._since_s + self._keep_s:
            self._turn()
            self._since_s = now_s

    def _turn(self) -> None:
        self._newer, self._older, self._since_s = {}, self._newer, None
