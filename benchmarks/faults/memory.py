"""Resident memory of processes over a run: flat, or growing."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import psutil


@dataclass(slots=True)
class ResidentMemory:
    """Looks by name. The medians of the first and of the last of `parts` of a run are compared.

    Processes that were started anew have other ages than the first ones: that needs more room.
    """

    parts: int
    growth_max: float
    seen_bytes: dict[str, list[int]] = field(default_factory=dict)

    def note(self, name: str, pids: Iterable[int]) -> None:
        """Look once at the processes of `name`, unless one is gone."""
        try:
            rss_bytes = sum(psutil.Process(pid).memory_info().rss for pid in pids)
        except psutil.NoSuchProcess:
            return
        self.seen_bytes.setdefault(name, []).append(rss_bytes)

    def figures(self) -> dict[str, dict[str, int]]:
        """First and last bytes by name."""
        return {name: self._ends(values) for name, values in self.seen_bytes.items()}

    def problems(self) -> list[str]:
        """A sentence for each name whose memory grew."""
        return [
            f"{name} grew from {_mebibytes(ends['first'])} to {_mebibytes(ends['last'])}"
            for name, ends in self.figures().items()
            if ends["last"] > (1 + self.growth_max) * ends["first"]
        ]

    def rows(self) -> list[tuple[str, str]]:
        """The figures, for people."""
        return [
            (
                f"resident memory of {name}, first and last of {self.parts} parts",
                f"{_mebibytes(ends['first'])} → {_mebibytes(ends['last'])}",
            )
            for name, ends in self.figures().items()
        ]

    def _ends(self, values: list[int]) -> dict[str, int]:
        count = max(1, len(values) // self.parts)
        return {"first": int(median(values[:count])), "last": int(median(values[-count:]))}


def _mebibytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
