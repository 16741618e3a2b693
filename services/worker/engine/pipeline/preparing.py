"""The preparation for a change of groups that this engine has begun, if any, and its answer."""

from collections.abc import Callable

from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.pipeline.fact_log import FactLog
from services.worker.engine.pipeline.preparation import Preparation
from services.worker.engine.pipeline.serving import Serving
from services.worker.ipc import Prepare, Prepared

BUSY = "another change is being prepared here; try again"

PreparationOf = Callable[[Prepare, Configuration | None], Preparation]
"""Makes a preparation, given the present configuration."""


def prepared_for(command: Prepare, new: Configuration) -> bool:
    """Whether this worker runs in `new` what the preparation made ready.

    Other groups may have been prepared: when a member of those is lost before this worker has
    entered them, `new` keeps the layers that it had in them.
    """
    return Configuration.of(command.groups, new.stage.worker_id).stage == new.stage


class Preparing:
    """One at a time. It waits until the last change is wholly over, as long as the asker does."""

    def __init__(self, make: PreparationOf, serving: Serving, facts: FactLog) -> None:
        self._make = make
        self._serving = serving
        self._facts = facts
        self._asked: Prepare | None = None
        self._now: Preparation | None = None

    @property
    def running(self) -> bool:
        """Whether it needs turns."""
        return self._asked is not None or (self._now is not None and not self._now.over)

    def ask(self, command: Prepare) -> None:
        """Get ready, unless that is being done for something else."""
        if self._asked is not None or self._now is not None:
            self._answer(Prepared(command.attempt, BUSY))
        else:
            self._asked = command

    def advance(self, present: Configuration | None, settled: bool) -> None:
        """Do a little, once the last change is over; answer once it is done."""
        if self._asked is not None and settled:
            self._now, self._asked = self._make(self._asked, present), None
        if self._now is None or self._now.over:
            return
        answer = self._now.advance()
        if answer is not None:
            self._answer(answer)
            if answer.error:
                self._undo()

    def abandon(self, attempt: str) -> None:
        """Abort it; another attempt is ignored."""
        if self._asked is not None and self._asked.attempt == attempt:
            self._asked = None
        if self._now is not None and self._now.attempt == attempt:
            self._undo()

    def end(self, new: Configuration) -> None:
        """A change is carried out: use what was prepared if it is for that, or else abort it.

        A request to prepare the change after it goes on waiting.
        """
        now = self._now
        if now is not None and not (now.over and prepared_for(now.command, new)):
            self._undo()
        self._now = None
        if self._asked is not None and self._asked.groups[0].epoch <= new.epoch:
            self._asked = None

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
