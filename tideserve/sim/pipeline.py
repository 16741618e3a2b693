"""A simulated group of several stages at one epoch: how long each runs, and how busy they are."""

from collections.abc import Sequence as Row
from dataclasses import dataclass

from services.core.changeover.frames import Activations, activations
from services.core.cost.bubble import Interval, bubble_share
from services.core.planner.batch import IterationShape, Microbatch
from tideserve.sim.network import MESSAGE_BYTES
from tideserve.sim.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class StageRun:
    """A microbatch as the stages of `pipeline` run it, one after the other."""

    frame: Activations
    shape: IterationShape
    tokens: int
    pipeline: "Pipeline"

    @property
    def size_bytes(self) -> int:
        """Bytes that a stage sends to the next one."""
        return MESSAGE_BYTES + self.tokens * self.pipeline.hidden_bytes


class Pipeline:
    """`shares`: of each stage in the time of the model. `hidden_bytes`: of a token's activation."""

    def __init__(self, shares: Row[float], time_model: TimeModel, hidden_bytes: int) -> None:
        self.hidden_bytes = hidden_bytes
        self._shares = tuple(shares)
        self._time_model = time_model
        self._intervals: list[list[Interval]] = [[] for _ in shares]

    def run_of(self, microbatch: Microbatch) -> StageRun:
        """What the stages get of a microbatch."""
        frame = activations(microbatch, vacant_s=0.0)
        return StageRun(frame, shape_of(microbatch), microbatch.batch.tokens, self)

    def seconds(self, stage: int, run: StageRun) -> float:
        """How long a stage runs a microbatch; one without chunks takes no time."""
        return self._time_model.stage_s(run.shape, self._shares[stage]) if run.tokens else 0.0

    def note_run(self, stage: int, run: StageRun, interval: Interval) -> None:
        """A stage has run a microbatch."""
        if run.tokens:
            self._intervals[stage].append(interval)

    def busy(self) -> tuple[float, float]:
        """Seconds in which the stages ran something, and in which they could have.

        They could while a microbatch was anywhere between them; their share is `1 - bubble_share`.
        """
        complete = min(map(len, self._intervals))
        stages = [stage[:complete] for stage in self._intervals]
        busy_s = sum(end_s - start_s for stage in stages for start_s, end_s in stage)
        share = 1.0 - bubble_share(stages)
        return busy_s, busy_s / share if share else 0.0


def shape_of(microbatch: Microbatch) -> IterationShape:
    """The sizes for a time model."""
    chunks = microbatch.batch.chunks
    decodes = [chunk.start for chunk in chunks if len(chunk.token_ids) == 1]
    return IterationShape(
        len(decodes),
        sum(decodes),
        tuple([(one.start, len(one.token_ids)) for one in chunks if len(one.token_ids) > 1]),
    )
