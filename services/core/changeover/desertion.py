"""A member that its group goes on without: when it knows, and when it gives its requests up.

A worker that is cut off from the group records does not see that its group has ended, and nobody
answers its microbatches. Its former members say `Farewell` as they leave. If it is cut off from
them, too, it loses them. Its requests go on elsewhere, so it gives them up, but not before the
records had time to come: with these it may keep them.
"""

from dataclasses import dataclass

FAREWELL_WAIT_S = 2.0
"""After a `Farewell`: the record that the other member followed is on its way here, too."""
UNFINISHED_WAIT_S = 0.3
"""After the loss of a member amid a change: what its group still needs of the others comes sooner.

What it needs of the lost one never comes.
"""
ALONE_WAIT_S = 15.0
"""After the loss of a member: longer than a lease takes to end, and a change-over."""


@dataclass(slots=True)
class Desertion:
    """The state of one configuration. `left`: it is over here; the member waits for another one."""

    left: bool = False
    _farewell_s: float | None = None
    _lost_s: float | None = None

    @property
    def lost_member(self) -> bool:
        """Whether a member of the own group was lost: what is in flight does not come back."""
        return self._lost_s is not None

    def ends_no_change(self, now_s: float) -> bool:
        """Whether a change that is not over by now never will be in this configuration."""
        return self._lost_s is not None and now_s - self._lost_s > UNFINISHED_WAIT_S

    @property
    def waiting(self) -> bool:
        """Whether time may decide."""
        return not self.left and (self._farewell_s is not None or self._lost_s is not None)

    def note_farewell(self, now_s: float) -> None:
        """A member of the own group has left it for a later configuration."""
        if self._farewell_s is None:
            self._farewell_s = now_s

    def note_lost(self, now_s: float) -> None:
        """A member of the own group was lost."""
        if self._lost_s is None:
            self._lost_s = now_s

    def leave(self, now_s: float) -> bool:
        """Whether the time has come, for the first time."""
        if not self.waiting:
            return False
        farewell = self._farewell_s is not None and now_s - self._farewell_s > FAREWELL_WAIT_S
        alone = self._lost_s is not None and now_s - self._lost_s > ALONE_WAIT_S
        self.left = farewell or alone
        return self.left
