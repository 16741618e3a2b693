"""Workers that this gateway cannot reach, which are not asked for a while that grows. Pure.

They may seem to be the best ones to the scheduler, since nothing runs there. As Envoy ejects hosts.
"""

from collections.abc import Set
from dataclasses import dataclass, field

FIRST_S = 1.0
LONGEST_S = 30.0


@dataclass(slots=True)
class _Failure:
    until_s: float
    pause_s: float


@dataclass(slots=True)
class Reach:
    """Addresses (host:port) whose last connection came to nothing."""

    _failures: dict[str, _Failure] = field(default_factory=dict)

    def failed(self, address: str, now_s: float) -> None:
        """A connection has ended without a word of the worker."""
        before = self._failures.get(address)
        if before is not None and now_s < before.until_s:
            return  # it had begun before
        pause_s = min(2 * before.pause_s, LONGEST_S) if before is not None else FIRST_S
        self._failures[address] = _Failure(now_s + pause_s, pause_s)

    def reached(self, address: str) -> None:
        """A worker has answered."""
        self._failures.pop(address, None)

    def keep_only(self, addresses: Set[str]) -> None:
        """Forget all others."""
        for address in self._failures.keys() - addresses:
            del self._failures[address]

    def avoided(self, now_s: float) -> tuple[tuple[str, ...], float]:
        """The addresses to avoid now, and for how many seconds that holds of all of them."""
        until_s = {
            one: told.until_s for one, told in self._failures.items() if now_s < told.until_s
        }
        return tuple(until_s), min(until_s.values(), default=now_s) - now_s
