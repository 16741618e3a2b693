"""Whether what requests were promised was kept, for measured and for simulated ones. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Kept(NamedTuple):
    """Whether one request got its first token in time, and its others on average.

    `token_group` is the share of its groups of tokens that ended in time. None was not promised.
    """

    ttft: bool | None
    tpot: bool | None
    token_group: float | None

    @property
    def both(self) -> bool:
        """Whether no promise of the first two was broken."""
        return self.ttft is not False and self.tpot is not False


NOTHING_KEPT = Kept(False, False, 0.0)
"""A request without a token has this, whatever the reason."""


@dataclass(slots=True)
class TokenGroups:
    """The groups of tokens of one request after its first token, which came at `from_s`.

    A group of `size` tokens is due `size` times `tpot_s` after the one before it ended (BROS §4.2).
    Tokens after the last whole group have no deadline.
    """

    size: int
    tpot_s: float
    from_s: float
    tokens: int = 0
    ended: int = 0
    in_time: int = 0

    def note(self, now_s: float) -> None:
        """The next token is here."""
        self.tokens += 1
        if self.tokens % self.size:
            return
        self.ended += 1
        self.in_time += now_s <= self.due_s
        self.from_s = now_s

    def give_up(self, now_s: float) -> None:
        """No token came from the last one to `now_s`: a group that was due before is late."""
        self.ended += now_s > self.due_s

    @property
    def due_s(self) -> float:
        """When the group that is under way must have ended."""
        return self.from_s + self.size * self.tpot_s

    @property
    def share(self) -> float:
        """Part of the groups that ended in time; 1 of none."""
        return self.in_time / self.ended if self.ended else 1.0


def attainment(kept: Sequence[Kept]) -> dict[str, float | None]:
    """The mean over requests of what was kept, by promise; None where nothing was promised.

    For groups of tokens it is that of the requests' shares, as BROS §7.1 has it.
    """
    return {
        "ttft": _mean(one.ttft for one in kept),
        "tpot": _mean(one.tpot for one in kept),
        "token_group": _mean(one.token_group for one in kept),
    }


def goodput(kept: Sequence[Kept], seconds: float) -> dict[str, Any]:
    """Requests a second of which every target was kept."""
    good = sum(one.both for one in kept)
    return {"goodput_requests_per_s": good / seconds if seconds else None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
