"""Detection of growing resident memory of processes over a run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import psutil


@dataclass(slots=True)
class ResidentMemory:
    """Samples by name. Compares the medians of the first and the last of `parts` of a run.

    Restarted processes are younger than the initial processes, which needs a larger tolerance.
    """

    parts: int
    growth_max: float
    seen_bytes: dict[str, list[int]] = field(default_factory=dict)

    def note(self, name: str, pids: Iterable[int]) -> None:
        """Sample the processes of `name`, unless a process is gone."""
        try:
            rss_bytes = sum(psutil.Process(pid).memory_info().rss for pid in pids)
        except psutil.NoSuchProcess:
            return
        self.seen_bytes.setdefault(name, []).append(rss_bytes)

    def figures(self) -> dict[str, dict[str, int]]:
        """First and last bytes by name."""
        return {name: self._ends(values) for name, values in self.seen_bytes.items()}

    def problems(self) -> list[str]:
        """A sentence per name whose memory grew."""
        return [
            f"{name} grew from {_mebibytes(ends['first'])} to {_mebibytes(ends['last'])}"
            for name, ends in self.figures().items()
            if ends["last"] > (1 + self.growth_max) * ends["first"]
        ]

    def rows(self) -> list[tuple[str, str]]:
        """The figures as table rows."""
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
