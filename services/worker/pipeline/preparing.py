"""The preparation for a change of groups that this engine has begun, if any, and its answer."""

from collections.abc import Callable

from services.worker.ipc import Prepare, Prepared
from services.worker.pipeline.configuration import Configuration
from services.worker.pipeline.fact_log import FactLog
from services.worker.pipeline.preparation import Preparation
from services.worker.pipeline.serving import Serving

BUSY = "the last change is not over here yet; try again"

PreparationOf = Callable[[Prepare, Configuration | None], Preparation]
"""Makes a preparation, given the present configuration."""


class Preparing:
    """One at a time."""

    def __init__(self, make: PreparationOf, serving: Serving, facts: FactLog) -> None:
        self._make = make
        self._serving = serving
        self._facts = facts
        self._now: Preparation | None = None

    @property
    def running(self) -> bool:
        """Whether it needs turns."""
        return self._now is not None and not self._now.over

    def begin(self, command: Prepare, present: Configuration | None, settled: bool) -> None:
        """Get ready, unless something else is still going on."""
        if not settled or self._now is not None:
            self._answer(Prepared(command.attempt, BUSY))
        else:
            self._now = self._make(command, present)

    def advance(self) -> None:
        """Do a little; once it is over, answer."""
        if self._now is None or self._now.over:
            return
        answer = self._now.advance()
        if answer is not None:
            self._answer(answer)
            if answer.error:
                self._undo()

    def abandon(self, attempt: str) -> None:
        """Undo it; another attempt is ignored."""
        if self._now is not None and self._now.attempt == attempt:
            self._undo()

    def end(self, new: Configuration) -> None:
        """A change is carried out: use what was prepared, or undo it if it was for other groups."""
        if self._now is not None and tuple(self._now.command.groups) != new.groups:
            self._undo()
        self._now = None

    def note_ended(self, transfer_id: str, intact: bool) -> bool:
        """Hear of a transfer; whether it was the preparation's."""
        return self._now is not None and self._now.note_ended(transfer_id, intact)

    def note_kept(self, attempt: str) -> None:
        """The leader keeps the use of this stage below the limit, for that attempt."""
        if self._now is not None:
            self._now.note_kept(attempt)

    def _undo(self) -> None:
        assert self._now is not None
        self._facts.undo(self._now.attempt)
        self._now.undo()
        self._now = None

    def _answer(self, answer: Prepared) -> None:
        self._facts.answer(answer)
        self._serving.news.prepared.append(answer)
