"""Runs planned microbatches, forwards their results, and collects output for clients.

Terms: a microbatch is a batch that the planner has planned; a pipeline has several in flight. An
iteration is the run of a microbatch by this stage. A sequence is an attempt at a request, with an
id of its own; output for clients carries the request's id.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from services.core.changeover.configuration import Configuration
from services.core.changeover.frames import Activations, Samples, activations
from services.core.changeover.vocabulary import NoteAdopted, NoteMoved
from services.core.cost.bubble import BubbleMeter
from services.core.cost.iteration_time import IterationMeter
from services.core.cost.refinement import CostRefiner
from services.core.histogram import ITERATION_TOKENS, HistogramMeter
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
from services.core.planner.sequence_ids import request_id_of
from services.core.planner.state import PlannerState
from services.core.request import Request
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.stage_runner import Meanwhile, StageRunner, hidden_bytes
from services.worker.ipc import AdoptedRequest, MovedRequest, Prepared, RequestTimes, Shipped

PREEMPTION_TIMES_MAX = 32  # per sequence; times of later preemptions are not reported
# Entries are pruned when there are more than twice the planner's sequences, plus this margin.
PRUNE_MARGIN = 64


class _Activity(Enum):
    WAIT = auto()
    PREFILL = auto()
    DECODE = auto()


@dataclass(slots=True)
class _Entry:
    """The times of a sequence so far."""

    began_s: float
    since_s: float  # start of the present activity
    activity: _Activity = _Activity.WAIT
    decodes: bool = False  # its first token was emitted, here or at another engine
    spent_s: dict[_Activity, float] = field(default_factory=lambda: dict.fromkeys(_Activity, 0.0))
    preempted_s: list[float] = field(default_factory=list)

    def switch_to(self, activity: _Activity, now_s: float) -> None:
        self.spent_s[self.activity] += max(0.0, now_s - self.since_s)
        self.activity, self.since_s = activity, now_s


class RequestClock:
    """Measures how long each sequence waits, prefills and decodes in this engine."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        # Sequences that wait to run. Usually there are none, and `note_launched` returns at once.
        self._waiting: set[str] = set()

    def begin(self, seq_id: str, now_s: float, decodes: bool = False) -> None:
        """Start the clock of a sequence; `decodes`: it already has output of another engine."""
        self._entries[seq_id] = _Entry(now_s, now_s, decodes=decodes)
        self._waiting.add(seq_id)

    def note_launched(self, seq_ids: Callable[[], Iterable[str]], now_s: float) -> None:
        """Record the sequences of the next microbatch; `seq_ids` is called only if any wait."""
        if not self._waiting:
            return
        for seq_id in self._waiting.intersection(seq_ids()):
            entry = self._entries[seq_id]
            entry.switch_to(_Activity.DECODE if entry.decodes else _Activity.PREFILL, now_s)
            self._waiting.discard(seq_id)

    def note_emitted(self, seq_id: str, now_s: float) -> None:
        """Record that the sequence has output, so that it decodes from now on."""
        entry = self._entries.get(seq_id)
        if entry is not None and not entry.decodes:
            entry.decodes = True
            if entry.activity is _Activity.PREFILL:
                entry.switch_to(_Activity.DECODE, now_s)

    def note_preempted(self, seq_ids: Iterable[str], now_s: float) -> None:
        """Record the sequences that wait now: those that ran until now have been preempted."""
        for seq_id in seq_ids:
            entry = self._entries.get(seq_id)
            if entry is None or seq_id in self._waiting:
                continue
            entry.switch_to(_Activity.WAIT, now_s)
            self._waiting.add(seq_id)
            if len(entry.preempted_s) < PREEMPTION_TIMES_MAX:
                entry.preempted_s.append(now_s - entry.began_s)

    def end(self, seq_id: str, now_s: float) -> RequestTimes | None:
        """Stop the clock of a sequence; returns its times, None if it is unknown."""
        self._waiting.discard(seq_id)
        entry = self._entries.pop(seq_id, None)
        if entry is None:
            return None
        entry.switch_to(entry.activity, now_s)
        spent_s = entry.spent_s
        return RequestTimes(
            spent_s[_Activity.WAIT],
            spent_s[_Activity.PREFILL],
            spent_s[_Activity.DECODE],
            entry.preempted_s,
        )

    def prune(self, known: Container[str], count: int) -> None:
        """If there are many entries, remove those not in `known`, which has `count` sequences."""
        if len(self._entries) > 2 * count + PRUNE_MARGIN:
            for seq_id in [seq_id for seq_id in self._entries if seq_id not in known]:
                self.end(seq_id, 0.0)

    def check_invariants(self, running: Mapping[str, object]) -> None:
        """Raise AssertionError unless all waiting and `running` sequences have entries."""
        assert self._waiting <= self._entries.keys()
        assert running.keys() <= self._entries.keys()


@dataclass(slots=True)
class EngineOutbox:
    """Results for the servicer since the last `ipc.Progress`."""

    tokens: list[EmitToken] = field(default_factory=list)
    refusals: list[RefuseRequest] = field(default_factory=list)
    adopted: list[AdoptedRequest] = field(default_factory=list)
    moved: list[MovedRequest] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    shipped: list[Shipped] = field(default_factory=list)
    times: dict[str, RequestTimes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        # `times` belong to requests that ended (a token or refusal) or moved.
        answers = self.prepared or self.shipped
        return bool(self.tokens or self.refusals or self.adopted or self.moved or answers)


Interrupts = Callable[[Microbatch], Callable[[], bool] | None]
"""Returns for a microbatch the predicate that is True when it must stop, or None."""


class Serving:
    """Runs microbatches for the group member of this engine and collects its outbox.

    Commands of the planner carry sequence ids; the outbox carries the gateway's request ids.
    """

    def __init__(
        self,
        state: PlannerState,
        stage: StageRunner,
        links: Links,
        now_s: Callable[[], float],
        refiner: CostRefiner | None,
    ) -> None:
        self.refiner = refiner  # learns from iterations of all layers; None: the model is fixed
        self.outbox = EngineOutbox()
        self.meter = BubbleMeter()  # busy and idle time of this stage in pipelines
        self.iterations = IterationMeter(state.config.cost_model)  # measured and predicted times
        # Tokens of iterations planned here: later stages run the same tokens.
        self.iteration_tokens = HistogramMeter(ITERATION_TOKENS)
        self._clock = RequestClock()
        self._preemptions_seen = 0  # the planner's total of preemptions at the last call
        self._state = state
        self._resumes_work = state.config.preempted_work is PreemptedWork.RESUME
        self._stage = stage
        self._links = links
        self._now_s = now_s
        self._ended_s: float | None = None  # end of the last iteration; None after idle time

    # --- output for clients

    def begin(self, seq_id: str, request: Request) -> None:
        """Start the clock of a sequence that is about to reach the planner."""
        self._clock.prune(self._state.sequences, len(self._state.sequences))
        self._clock.begin(seq_id, request.arrival_s, decodes=bool(request.output_ids))

    def abort(self, seq_id: str) -> None:
        """Stop the clock of an aborted sequence."""
        self._clock.end(seq_id, self._now_s())

    def deliver(self, command: EmitToken | RefuseRequest) -> None:
        """Put a token or a refusal of the planner into the outbox."""
        seq_id = command.request_id
        if isinstance(command, RefuseRequest):
            self._clock.end(seq_id, self._now_s())
            self.outbox.refusals.append(replace(command, request_id=request_id_of(seq_id)))
            return
        if command.index == 0:
            self._clock.note_emitted(seq_id, self._now_s())
        self.outbox.tokens.append(command._replace(request_id=request_id_of(seq_id)))
        if command.finish_reason is not None:
            self._note_end(seq_id)

    def note_adopted(self, command: NoteAdopted) -> None:
        """Report a sequence that this engine has adopted from another engine."""
        state = command.sequence
        seq_id = state.request.request_id
        self._clock.begin(seq_id, self._now_s(), decodes=bool(state.output_ids))
        self.outbox.adopted.append(
            AdoptedRequest(
                request_id_of(seq_id),
                self._links.group_id,
                self._links.epoch,
                list(state.output_ids),
                state.logprobs,
                state.prompt_logprobs if state.output_ids else None,
                state.cached_tokens,
            )
        )

    def note_moved(self, command: NoteMoved, address: str) -> None:
        """Report a sequence that another engine, at `address`, has adopted."""
        self._note_end(command.seq_id)
        self.outbox.moved.append(
            MovedRequest(
                request_id_of(command.seq_id),
                command.worker_id,
                address,
                command.group.group_id,
                command.group.epoch,
                command.next_index,
            )
        )

    def _note_end(self, seq_id: str) -> None:
        """Report the times of a sequence that has ended or moved away."""
        times = self._clock.end(seq_id, self._now_s())
        if times is not None:
            self.outbox.times[request_id_of(seq_id)] = times

    # --- microbatches

    def note_planned(self, microbatch: Microbatch | None, now_s: float) -> None:
        """Update the clocks after a call of the planner, which may have preempted sequences."""
        state = self._state
        if state.preemptions_total != self._preemptions_seen:
            self._preemptions_seen = state.preemptions_total
            self._clock.note_preempted((sequence.seq_id for sequence in state.waiting), now_s)
        if microbatch is not None:
            chunks = microbatch.batch.chunks
            self._clock.note_launched(lambda: (chunk.seq_id for chunk in chunks), now_s)

    def run_first(
        self,
        microbatch: Microbatch,
        configuration: Configuration | None,
        interrupts: Interrupts | None,
        meanwhile: Meanwhile | None = None,
    ) -> IterationEvent | None:
        """Run the leader's stage of a microbatch; `meanwhile` as for `StageRunner.run_first`.

        Returns the end of the iteration in a single-worker group. In a pipeline, sends the hidden
        states to the next stage and returns None.
        """
        if self._state.stages == 1:
            return self._run_alone(microbatch, interrupts, meanwhile)
        assert configuration is not None
        payload: Any = b""
        vacant_s = 0.0
        if microbatch.batch.chunks:
            started_s = self._now_s()
            vacant_s = self.meter.note_launch(microbatch.number, started_s)
            output = self._stage.run_first(microbatch)
            ended_s = self._now_s()
            self.meter.note_run(started_s, ended_s)
            self._record_time(microbatch.batch, ended_s - started_s)
            assert output is not None
            payload = hidden_bytes(output)
        self._links.send(configuration.next_worker, activations(microbatch, vacant_s), payload)
        return None

    def pause(self) -> None:
        """Record that nothing was launched: the time until the next launch is idle time."""
        self._ended_s = None

    def run_later_stage(
        self, configuration: Configuration, frame: Activations, payload: Any
    ) -> None:
        """Run a later stage, and send its result to the next stage or to the leader."""
        started_s = self._now_s()
        output = self._stage.run_next(frame, payload)
        if frame.chunks:
            ended_s = self._now_s()
            self.meter.note_run(started_s, ended_s, frame.vacant_s)
            ran = tuple((chunk.start, chunk.tokens) for chunk in frame.chunks)
            self.iterations.add(ran, ended_s - started_s, self._stage.share)
        if configuration.is_last:
            assert output.sampled is not None
            samples = Samples(frame.number, output.sampled, output.notes)
            self._links.send(configuration.leader, samples)
        else:
            self._links.send(configuration.next_worker, frame, hidden_bytes(output))

    def _run_alone(
        self, microbatch: Microbatch, interrupts: Interrupts | None, meanwhile: Meanwhile | None
    ) -> IterationEvent:
        interrupted = interrupts(microbatch) if interrupts is not None else None
        suspends = microbatch.preemptible and self._resumes_work
        # The loop's work since the last iteration counts as time of this one.
        started_s = self._now_s() if self._ended_s is None else self._ended_s
        output = self._stage.run_first(
            microbatch, interrupted, suspends=suspends, meanwhile=meanwhile
        )
        now_s = self._ended_s = self._now_s()
        if output is None:
            return IterationSuspended(now_s) if suspends else IterationDropped(now_s)
        if microbatch.resumes is None:
            self._record_time(microbatch.batch, now_s - started_s)
        else:  # resumed: only a part of the iteration was measured, so do not record its time
            self.iteration_tokens.add(microbatch.batch.tokens)
        assert output.sampled is not None
        return IterationFinished(now_s, output.sampled, microbatch.number, output.notes)

    def _record_time(self, batch: Batch, measured_s: float) -> None:
        if batch.chunks:
            self.iteration_tokens.add(batch.tokens)
            chunks = tuple([(chunk.start, len(chunk.token_ids)) for chunk in batch.chunks])
            share = self._stage.share
            predicted_s = self.iterations.add(chunks, measured_s, share)
            # A stage of a pipeline has other costs around its layers than a worker alone.
            if self.refiner is not None and share == 1:
                self.refiner.add(chunks, measured_s, predicted_s)
