"""Plans microbatches as a leader, runs this worker's stage of them, passes them on."""

from collections.abc import Callable, Iterable
from typing import Any

from services.core.cost.bubble import BubbleMeter
from services.core.cost.iteration_time import IterationMeter
from services.core.cost.iteration_tokens import IterationTokenMeter
from services.core.planner.batch import Batch, Microbatch
from services.core.planner.events import (
    Command,
    EmitToken,
    Event,
    IterationDropped,
    IterationFinished,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.sequence_names import SequenceNames, request_of
from services.core.planner.state import IterationState
from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.pipeline.frames import Activations, Samples
from services.worker.engine.pipeline.kv_exchange import MemberExchange
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.news import News
from services.worker.engine.pipeline.request_clock import RequestClock
from services.worker.engine.pipeline.stage_runner import StageRunner, activations, hidden_bytes

Interrupts = Callable[[frozenset[str]], Callable[[], bool] | None]


class Serving:
    """The model's part in a turn; `news` collects the planner's commands for clients.

    `meter` counts this stage's time in pipelines, with paced iterations as long as they are padded;
    `iterations` compares the iterations that it runs with the cost model, `iteration_tokens` counts
    the tokens of those that it plans, `clock` measures where requests spend time. `names` has the
    sequence of each request: events use the names of sequences, news the ids of requests.
    """

    def __init__(
        self,
        state: IterationState,
        stage: StageRunner,
        links: Links,
        exchange: MemberExchange,
        names: SequenceNames,
        now_s: Callable[[], float],
    ) -> None:
        self.news = News()
        self.names = names
        self.meter = BubbleMeter()
        self.iterations = IterationMeter(state.config.cost_model)
        self.iteration_tokens = IterationTokenMeter()
        self.clock = RequestClock()
        self._preemptions_seen = 0
        self._state = state
        self._stage = stage
        self._links = links
        self._exchange = exchange
        self._now_s = now_s
        self._ended_s: float | None = None  # of an iteration that another follows at once

    def handle(self, event: Event) -> None:
        """Have the planner apply an event, and collect its commands."""
        if isinstance(event, RequestArrived):
            self.clock.prune(self._state.sequences, len(self._state.sequences))
            if event.request.request_id not in self._state.sequences:
                self.clock.begin(event.request.request_id, event.request.arrival_s)
        elif isinstance(event, RequestAborted):
            self.clock.end(event.request_id, event.now_s)
            self.names.end(event.request_id)
        commands = self._state.handle(event)
        self.tell(commands)
        for command in commands:
            if not isinstance(command, EmitToken):
                continue
            if command.index == 0:
                self.clock.emitted(command.request_id, event.now_s)
            if command.finish_reason is not None:
                self.note_end(command.request_id, event.now_s)

    def tell(self, commands: Iterable[Command]) -> None:
        """Note what the planner has for clients."""
        self.news.add(self.names.told(commands))

    def note_end(self, name: str, now_s: float) -> None:
        """A sequence has ended or moved away: its last event tells its times."""
        times = self.clock.end(name, now_s)
        if times is not None:
            self.news.times[request_of(name)] = times

    def launch(self, configuration: Configuration | None, interrupts: Interrupts | None) -> bool:
        """Run the leader's stage of one more microbatch; False if there is none to run now."""
        microbatch = self._plan()
        if microbatch is None:
            self.pause()
            return False
        if self._state.stages == 1:
            self._run_alone(microbatch, interrupts)
            return True
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
        return True

    def pause(self) -> None:
        """Nothing may be launched now: the time until something is belongs to no iteration."""
        self._ended_s = None

    def follow(self, configuration: Configuration, body: Activations, payload: Any) -> None:
        """Run a later stage, and pass its result to the next stage, or to the leader."""
        with self._stage.lock:
            chunks = ((chunk.request_id, chunk.blocks) for chunk in body.chunks)
            self._state.table.apply(body.released, chunks)
            self._exchange.forget(body.released)
        self._exchange.claim(chunk.request_id for chunk in body.chunks)
        started_s = self._now_s()
        output = self._stage.run_next(body, payload)
        if body.chunks:
            ended_s = self._now_s()
            self.meter.ran(started_s, ended_s, body.vacant_s)
            ran = ((chunk.start, chunk.tokens) for chunk in body.chunks)
            self.iterations.ran(ran, ended_s - started_s, self._stage.share)
        if configuration.is_last:
            assert output.sampled is not None
            self._links.send(
                configuration.leader, Samples(body.number, output.sampled, output.notes)
            )
        else:
            self._links.send(configuration.next_worker, body, hidden_bytes(output))

    def finish(self, body: Samples) -> None:
        """Take the results of a microbatch that the last stage sampled."""
        now_s = self._now_s()
        self.meter.finished(body.number, now_s)
        self.handle(IterationFinished(now_s, body.tokens, body.number, body.notes))

    def _plan(self) -> Microbatch | None:
        if not self._state.has_slot:
            return None
        with self._stage.lock:
            microbatch = self._state.plan()
            if microbatch is not None:
                self._exchange.forget(microbatch.released)
        self._note_times(microbatch)
        return microbatch

    def _note_times(self, microbatch: Microbatch | None) -> None:
        state = self._state
        if state.preemptions_total != self._preemptions_seen:
            self._preemptions_seen = state.preemptions_total
            self.clock.preempted((one.request_id for one in state.waiting), self._now_s())
        if microbatch is not None:
            chunks = microbatch.batch.chunks
            self.clock.launched(lambda: (chunk.request_id for chunk in chunks), self._now_s())

    def _run_alone(self, microbatch: Microbatch, interrupts: Interrupts | None) -> None:
        interrupted = None
        if interrupts is not None:
            names = (chunk.request_id for chunk in microbatch.batch.chunks)
            interrupted = interrupts(frozenset(map(request_of, names)))
        # Work of the loop between two iterations is part of the second.
        started_s = self._now_s() if self._ended_s is None else self._ended_s
        output = self._stage.run_first(microbatch, interrupted)
        now_s = self._ended_s = self._now_s()
        if output is None:
            self.handle(IterationDropped(now_s))
        else:
            self._compare(microbatch.batch, now_s - started_s)
            assert output.sampled is not None
            number = microbatch.number
            self.handle(IterationFinished(now_s, output.sampled, number, output.notes))

    def _compare(self, batch: Batch, measured_s: float) -> None:
        if batch.chunks:
            self.iteration_tokens.ran(batch.tokens)
            chunks = ((chunk.start, len(chunk.token_ids)) for chunk in batch.chunks)
            self.iterations.ran(chunks, measured_s, self._stage.share)
