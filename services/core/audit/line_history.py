"""History of the lines of batches, from the event logs of all gateways.

Part of an audit: it checks the invariant I14 (`audit.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.core.audit.facts import LineEnded, LinesClaimed
from services.core.audit.record import Findings, Recorded

Key = tuple[str, int]
"""Batch and line."""


@dataclass(slots=True)
class LineHistory:
    """The last leader that claimed each line, and all ends."""

    findings: Findings
    claimed: dict[Key, int] = field(default_factory=dict)  # largest token
    ended: dict[Key, int] = field(default_factory=dict)  # token

    def noted(self, entries: Iterable[Recorded]) -> Iterator[Recorded]:
        """The entries of a gateway, whose lines are noted on the way; gateways in any order."""
        for entry in entries:
            match entry.value:
                case LinesClaimed() as claim:
                    for line in claim.lines:
                        key = claim.batch_id, line
                        self.claimed[key] = max(self.claimed.get(key, 0), claim.token)
                case LineEnded() as end:
                    self._note_end(end)
            yield entry

    def _note_end(self, end: LineEnded) -> None:
        key = end.batch_id, end.line
        self.findings.check("I14", key not in self.ended, "line {1} of {0} ended twice", *key)
        self.ended[key] = end.token

    def finish(self) -> None:
        """Check the ends, once all gateways are noted."""
        for key, token in self.ended.items():
            # A gateway that is killed after a claim may not have logged it.
            self.findings.check(
                "I14",
                token >= self.claimed.get(key, 0),
                "line {1} of {0} ended with a result of leader {2}, but leader {3} claimed it",
                *(*key, token, self.claimed.get(key, 0)),
            )
