"""Runs what the machine planned, passes it on, and collects what clients are told."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from services.core.changeover.configuration import Configuration
from services.core.changeover.frames import Activations, Samples, activations
from services.core.changeover.vocabulary import NoteAdopted, NoteMoved
from services.core.cost.bubble import BubbleMeter
from services.core.cost.iteration_time import IterationMeter
from services.core.cost.iteration_tokens import IterationTokenMeter
from services.core.planner.batch import Batch, Microbatch
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationEvent,
    IterationFinished,
    IterationSuspended,
    RefuseRequest,
)
from services.core.planner.preemption import PreemptedWork
from services.core.planner.sequence_names import request_of
from services.core.planner.state import PlannerState
from services.core.request import Request
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.request_clock import RequestClock
from services.worker.engine.pipeline.stage_runner import StageRunner, hidden_bytes
from services.worker.ipc import AdoptedRequest, MovedRequest, Prepared, RequestTimes


@dataclass(slots=True)
class News:
    """Results since the last frame to the servicer; see `ipc.Progress`."""

    tokens: list[EmitToken] = field(default_factory=list)
    refusals: list[RefuseRequest] = field(default_factory=list)
    adopted: list[AdoptedRequest] = field(default_factory=list)
    moved: list[MovedRequest] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    times: dict[str, RequestTimes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.refusals or self.adopted or self.moved or self.prepared)


Interrupts = Callable[[Microbatch], Callable[[], bool] | None]


class Serving:
    """The model's part in a turn. Commands use names of sequences, `news` ids of requests.

    `meter` counts this stage's time in pipelines, with paced iterations as long as they are padded;
    `iterations` compares the iterations that it runs with the cost model, `iteration_tokens` counts
    the tokens of those that it plans.
    """

    def __init__(
        self, state: PlannerState, stage: StageRunner, links: Links, now_s: Callable[[], float]
    ) -> None:
        self.news = News()
        self.meter = BubbleMeter()
        self.iterations = IterationMeter(state.config.cost_model)
        self.iteration_tokens = IterationTokenMeter()
        self._clock = RequestClock()
        self._preemptions_seen = 0
        self._state = state
        self._resumes_work = state.config.preempted_work is PreemptedWork.RESUME
        self._stage = stage
        self._links = links
        self._now_s = now_s
        self._ended_s: float | None = None  # of an iteration that another follows at once

    # --- what clients are told

    def begin(self, name: str, request: Request) -> None:
        """A sequence is about to begin."""
        self._clock.prune(self._state.sequences, len(self._state.sequences))
        self._clock.begin(name, request.arrival_s, decodes=bool(request.output_ids))

    def abort(self, name: str) -> None:
        """Nobody wants a sequence any more."""
        self._clock.end(name, self._now_s())

    def tell(self, command: EmitToken | RefuseRequest) -> None:
        """Note what the planner has for a client."""
        name = command.request_id
        if isinstance(command, RefuseRequest):
            self._clock.end(name, self._now_s())
            self.news.refusals.append(replace(command, request_id=request_of(name)))
            return
        if command.index == 0:
            self._clock.emitted(name, self._now_s())
        self.news.tokens.append(command._replace(request_id=request_of(name)))
        if command.finish_reason is not None:
            self._note_end(name)

    def note_adopted(self, command: NoteAdopted) -> None:
        """This engine leads a sequence from now on that another one began."""
        state = command.sequence
        name = state.request.request_id
        self._clock.begin(name, self._now_s(), decodes=bool(state.output_ids))
        self.news.adopted.append(
            AdoptedRequest(
                request_of(name),
                self._links.group_id,
                self._links.epoch,
                list(state.output_ids),
                state.logprobs,
                state.prompt_logprobs if state.output_ids else None,
                state.cached_tokens,
            )
        )

    def note_moved(self, command: NoteMoved, address: str) -> None:
        """Another engine, at `address`, leads a sequence from now on."""
        self._note_end(command.request_id)
        self.news.moved.append(
            MovedRequest(
                request_of(command.request_id),
                command.worker_id,
                address,
                command.group.group_id,
                command.group.epoch,
                command.next_index,
            )
        )

    def _note_end(self, name: str) -> None:
        """A sequence has ended or moved away: its last event tells its times."""
        times = self._clock.end(name, self._now_s())
        if times is not None:
            self.news.times[request_of(name)] = times

    # --- what runs

    def note_planned(self, microbatch: Microbatch | None, now_s: float) -> None:
        """Note a call of the planner and its answer."""
        state = self._state
        if state.preemptions_total != self._preemptions_seen:
            self._preemptions_seen = state.preemptions_total
            self._clock.preempted((one.request_id for one in state.waiting), now_s)
        if microbatch is not None:
            chunks = microbatch.batch.chunks
            self._clock.launched(lambda: (chunk.request_id for chunk in chunks), now_s)

    def run_first(
        self,
        microbatch: Microbatch,
        configuration: Configuration | None,
        interrupts: Interrupts | None,
    ) -> IterationEvent | None:
        """Run the leader's stage of a microbatch; its end, unless other stages follow."""
        if self._state.stages == 1:
            return self._run_alone(microbatch, interrupts)
        assert configuration is not None
        payload: Any = b""
        vacant_s = 0.0
        if microbatch.batch.chunks:
            started_s = self._now_s()
            vacant_s = self.meter.launched(microbatch.number, started_s)
            output = self._stage.run_first(microbatch)
            ended_s = self._now_s()
            self.meter.ran(started_s, ended_s)
            self._compare(microbatch.batch, ended_s - started_s)
            assert output is not None
            payload = hidden_bytes(output)
        self._links.send(configuration.next_worker, activations(microbatch, vacant_s), payload)
        return None

    def pause(self) -> None:
        """Nothing may be launched now: the time until the next launch belongs to no iteration."""
        self._ended_s = None

    def follow(self, configuration: Configuration, frame: Activations, payload: Any) -> None:
        """Run a later stage, and pass its result to the next stage, or to the leader."""
        started_s = self._now_s()
        output = self._stage.run_next(frame, payload)
        if frame.chunks:
            ended_s = self._now_s()
            self.meter.ran(started_s, ended_s, frame.vacant_s)
            ran = ((chunk.start, chunk.tokens) for chunk in frame.chunks)
            self.iterations.ran(ran, ended_s - started_s, self._stage.share)
        if configuration.is_last:
            assert output.sampled is not None
            samples = Samples(frame.number, output.sampled, output.notes)
            self._links.send(configuration.leader, samples)
        else:
            self._links.send(configuration.next_worker, frame, hidden_bytes(output))

    def _run_alone(self, microbatch: Microbatch, interrupts: Interrupts | None) -> IterationEvent:
        interrupted = interrupts(microbatch) if interrupts is not None else None
        suspends = microbatch.preemptible and self._resumes_work
        # Work of the loop between two iterations is part of the second.
        started_s = self._now_s() if self._ended_s is None else self._ended_s
        output = self._stage.run_first(microbatch, interrupted, suspends=suspends)
        now_s = self._ended_s = self._now_s()
        if output is None:
            return IterationSuspended(now_s) if suspends else IterationDropped(now_s)
        if microbatch.resumes is None:
            self._compare(microbatch.batch, now_s - started_s)
        else:  # a part of it has run before
            self.iteration_tokens.ran(microbatch.batch.tokens)
        assert output.sampled is not None
        return IterationFinished(now_s, output.sampled, microbatch.number, output.notes)

    def _compare(self, batch: Batch, measured_s: float) -> None:
        if batch.chunks:
            self.iteration_tokens.ran(batch.tokens)
            chunks = ((chunk.start, len(chunk.token_ids)) for chunk in batch.chunks)
            self.iterations.ran(chunks, measured_s, self._stage.share)
