"""Plans microbatches as a leader, runs this worker's stage of them, passes them on."""

from collections.abc import Callable
from typing import Any

from services.core.iteration.batch import Microbatch
from services.core.iteration.bubble import BubbleMeter
from services.core.iteration.events import Event, IterationDropped, IterationFinished
from services.core.iteration.state import IterationState
from services.worker.pipeline.configuration import Configuration
from services.worker.pipeline.frames import Activations, Samples
from services.worker.pipeline.kv_exchange import MemberExchange
from services.worker.pipeline.links import Links
from services.worker.pipeline.news import News
from services.worker.pipeline.stage_runner import StageRunner, activations, hidden_bytes

Interrupts = Callable[[frozenset[str]], Callable[[], bool] | None]


class Serving:
    """The model's part in a turn; `news` gets what the planner has for clients.

    `meter` counts this stage's time in pipelines, with paced iterations as long as they are padded.
    """

    def __init__(
        self,
        state: IterationState,
        stage: StageRunner,
        links: Links,
        exchange: MemberExchange,
        now_s: Callable[[], float],
    ) -> None:
        self.news = News()
        self.meter = BubbleMeter()
        self._state = state
        self._stage = stage
        self._links = links
        self._exchange = exchange
        self._now_s = now_s

    def handle(self, event: Event) -> None:
        """Have the planner apply an event, and note what it says."""
        self.news.add(self._state.handle(event))

    def launch(self, configuration: Configuration | None, interrupts: Interrupts | None) -> bool:
        """Run the leader's stage of one more microbatch; False if there is none to run now."""
        microbatch = self._plan()
        if microbatch is None:
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
            self.meter.ran(started_s, self._now_s())
            assert output is not None
            payload = hidden_bytes(output)
        self._links.send(configuration.next_worker, activations(microbatch, vacant_s), payload)
        return True

    def follow(self, configuration: Configuration, body: Activations, payload: Any) -> None:
        """Run a later stage, and pass on what it makes: to the next one, or to the leader."""
        with self._stage.lock:
            chunks = ((chunk.request_id, chunk.blocks) for chunk in body.chunks)
            self._state.table.apply(body.released, chunks)
            self._exchange.forget(body.released)
        self._exchange.claim(chunk.request_id for chunk in body.chunks)
        started_s = self._now_s()
        output = self._stage.run_next(body, payload)
        if body.chunks:
            self.meter.ran(started_s, self._now_s(), body.vacant_s)
        if configuration.is_last:
            assert output.sampled is not None
            self._links.send(configuration.leader, Samples(body.number, output.sampled))
        else:
            self._links.send(configuration.next_worker, body, hidden_bytes(output))

    def finish(self, body: Samples) -> None:
        """Take the results of a microbatch that the last stage sampled."""
        now_s = self._now_s()
        self.meter.finished(body.number, now_s)
        self.handle(IterationFinished(now_s, body.tokens, body.number))

    def _plan(self) -> Microbatch | None:
        if not self._state.has_slot:
            return None
        with self._stage.lock:
            microbatch = self._state.plan()
            if microbatch is not None:
                self._exchange.forget(microbatch.released)
        return microbatch

    def _run_alone(self, microbatch: Microbatch, interrupts: Interrupts | None) -> None:
        interrupted = None
        if interrupts is not None:
            interrupted = interrupts(frozenset(c.request_id for c in microbatch.batch.chunks))
        output = self._stage.run_first(microbatch, interrupted)
        now_s = self._now_s()
        if output is None:
            self.handle(IterationDropped(now_s))
        else:
            assert output.sampled is not None
            self.handle(IterationFinished(now_s, output.sampled, microbatch.number))
