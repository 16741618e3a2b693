"""Measures the time during which KV of shipments is sent."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BusyTime:
    """Seconds during which at least one transfer is under way; all times are on the same clock."""

    total_s: float = 0.0  # of the busy periods that have ended
    _under_way: set[str] = field(default_factory=set)
    _since_s: float = 0.0  # start of the busy period, if any

    def begin(self, transfer_id: str, now_s: float) -> None:
        """A transfer has started."""
        if not self._under_way:
            self._since_s = now_s
        self._under_way.add(transfer_id)

    def end(self, transfer_id: str, now_s: float) -> None:
        """A transfer has ended; no effect if it is unknown."""
        if transfer_id in self._under_way:
            self._under_way.discard(transfer_id)
            if not self._under_way:
                self.total_s += now_s - self._since_s
