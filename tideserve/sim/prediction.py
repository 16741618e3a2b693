"""Compares the times of a worker's iterations in its event log with those that it predicted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.core.audit.record import Recorded
from services.core.cost.model import CostModel
from services.core.planner.batch import Microbatch
from services.core.planner.events import (
    CostModelLearned,
    IterationDropped,
    IterationFinished,
    IterationSuspended,
    Planned,
)


@dataclass(frozen=True, slots=True)
class PredictedIteration:
    """An iteration of a worker alone; `models` counts the cost models learned before it."""

    ended_s: float
    predicted_s: float
    measured_s: float
    models: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted_s / self.measured_s - 1)


def predicted_iterations(
    model: CostModel | None, entries: Iterable[Recorded]
) -> Iterator[PredictedIteration]:
    """The iterations in a worker's log that it predicted; `model` is that of the log's header.

    As in the worker's metrics, the work between two iterations counts as time of the second.
    """
    models = 0
    running: Microbatch | None = None
    began_s: float | None = None  # end of the last iteration, None after idle time
    for entry in entries:
        match entry.value:
            case CostModelLearned(model=learned):
                model, models = learned, models + 1
            case Planned(now_s=now_s, microbatch=microbatch):
                running = microbatch
                began_s = None if microbatch is None else now_s if began_s is None else began_s
            case IterationDropped() | IterationSuspended():
                running = began_s = None
            case IterationFinished(now_s=now_s):
                whole = running is not None and running.resumes is None
                if whole and model is not None and began_s is not None and now_s > began_s:
                    assert running is not None
                    chunks = [(c.start, len(c.token_ids)) for c in running.batch.chunks]
                    yield PredictedIteration(now_s, model.batch_s(chunks), now_s - began_s, models)
                running, began_s = None, now_s
            case _:
                pass
