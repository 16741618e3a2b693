"""A simulated group of several stages at one epoch: what each runs, and what passes between them.

Microbatches and whatever else has to keep its place among them go from stage to stage in order.
"""

from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.core.cost.bubble import Interval, bubble_share
from services.core.planner.batch import IterationShape, Microbatch
from tideserve.sim.engine import Simulation
from tideserve.sim.network import MESSAGE_BYTES, Network
from tideserve.sim.time_model import TimeModel

HandlerOf = Callable[[str], Callable[..., Any]]
"""What to call at the worker of that name."""


@dataclass(frozen=True, slots=True)
class StageRun:
    """A microbatch as a stage runs it, since `started_s`; see `Microbatch` for the rest."""

    number: int
    shape: IterationShape
    tokens: int
    released: tuple[str, ...]
    block_counts: tuple[tuple[str, int], ...]
    started_s: float

    @classmethod
    def of(cls, microbatch: Microbatch, now_s: float) -> "StageRun":
        """The first stage's."""
        chunks = microbatch.batch.chunks
        decodes = [chunk.start for chunk in chunks if len(chunk.token_ids) == 1]
        shape = IterationShape(
            len(decodes),
            sum(decodes),
            tuple([(one.start, len(one.token_ids)) for one in chunks if len(one.token_ids) > 1]),
        )
        return cls(
            microbatch.number,
            shape,
            microbatch.batch.tokens,
            microbatch.released,
            tuple(microbatch.block_counts()),
            now_s,
        )

    def started(self, now_s: float) -> "StageRun":
        """The next stage's."""
        return replace(self, started_s=now_s)


class Stage(Protocol):
    """An instance as a stage: takes what comes, in order."""

    name: str

    def post(self, handler: Callable[..., Any], *arguments: Any) -> None: ...

    def follow(self, pipeline: "Pipeline", stage: int, run: StageRun) -> Any: ...

    def finish(self, number: int | None = None) -> None: ...


class Pipeline:
    """`shares`: of each stage in the time of the model. `hidden_bytes`: of a token's activation."""

    def __init__(
        self,
        stages: Row[Stage],
        shares: Row[float],
        simulation: Simulation,
        time_model: TimeModel,
        network: Network,
        hidden_bytes: int,
    ) -> None:
        self._stages = tuple(stages)
        self._shares = tuple(shares)
        self._simulation = simulation
        self._time_model = time_model
        self._network = network
        self._hidden_bytes = hidden_bytes
        self._intervals: list[list[Interval]] = [[] for _ in self._stages]

    def seconds(self, stage: int, run: StageRun) -> float:
        """How long a stage runs a microbatch; one without chunks takes no time."""
        return self._time_model.stage_s(run.shape, self._shares[stage]) if run.tokens else 0.0

    def pass_on(self, stage: int, run: StageRun) -> None:
        """A stage has run a microbatch: the next one gets activations, the first gets samples."""
        if run.tokens:
            self._intervals[stage].append((run.started_s, self._simulation.now_s))
        source = self._stages[stage].name
        if stage + 1 < len(self._stages):
            size_bytes = MESSAGE_BYTES + run.tokens * self._hidden_bytes
            following = self._stages[stage + 1]
            arguments = (following.follow, self, stage + 1, run)
            self._network.send(source, size_bytes, following.post, *arguments)
        else:
            first = self._stages[0]
            self._network.send(source, MESSAGE_BYTES, first.post, first.finish, run.number)

    def tell(self, stage: int, handler_of: HandlerOf, *arguments: Any) -> None:
        """Have the handler of each stage after `stage` called, behind all microbatches so far."""
        if stage + 1 < len(self._stages):
            source, following = self._stages[stage], self._stages[stage + 1]
            self._network.send(
                source.name,
                MESSAGE_BYTES,
                following.post,
                self._told,
                stage + 1,
                handler_of,
                arguments,
            )

    def _told(self, stage: int, handler_of: HandlerOf, arguments: tuple[Any, ...]) -> None:
        self.tell(stage, handler_of, *arguments)
        handler_of(self._stages[stage].name)(*arguments)

    def busy(self) -> tuple[float, float]:
        """Seconds in which the stages ran something, and in which they could have.

        They could while a microbatch was anywhere between them; their share is `1 - bubble_share`.
        """
        complete = min(map(len, self._intervals))
        stages = [stage[:complete] for stage in self._intervals]
        busy_s = sum(end_s - start_s for stage in stages for start_s, end_s in stage)
        share = 1.0 - bubble_share(stages)
        return busy_s, busy_s / share if share else 0.0
