"""The new leader's side of a change: waits for its stages, then takes sequences over."""

import logging
from collections.abc import Callable
from dataclasses import replace

from services.core.changeover.handover import absent_stages, followers_of
from services.core.planner.sequence import Phase
from services.core.planner.sequence_names import request_of
from services.core.planner.state import IterationState
from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.pipeline.frames import Adopt, Adopted, AllAdopted, FreeKv, Joined
from services.worker.engine.pipeline.handover import Handover
from services.worker.engine.pipeline.kv_exchange import LeaderExchange
from services.worker.engine.pipeline.links import Links, Received
from services.worker.engine.pipeline.serving import Serving
from services.worker.ipc import AdoptedRequest

log = logging.getLogger(__name__)


class Takeover:
    """Frames that come before all stages have joined are deferred: blocks are not counted yet."""

    def __init__(
        self,
        state: IterationState,
        links: Links,
        exchange: LeaderExchange,
        handover: Handover,
        serving: Serving,
        now_s: Callable[[], float],
    ) -> None:
        self._state = state
        self._links = links
        self._exchange = exchange
        self._handover = handover
        self._serving = serving
        self._now_s = now_s
        self._configuration: Configuration | None = None
        self._joined: dict[str, Joined] | None = None
        self._deferred: list[Received] = []
        self._not_done: set[str] = set()  # leaders that may still hand over sequences

    @property
    def waiting(self) -> bool:
        """Whether a stage has not joined yet."""
        return self._joined is not None

    @property
    def settled(self) -> bool:
        """Whether all stages have joined and no leader hands over sequences any more."""
        return self._joined is None and not self._not_done

    def enter(self, new: Configuration) -> None:
        """Begin a configuration."""
        self._configuration = new
        self._deferred.clear()
        others = set(new.members) - {self._links.worker_id}
        self._not_done = others if new.leads else set()
        self._joined = {} if new.leads else None

    def defers(self, received: Received) -> bool:
        """Keep a frame until all stages have joined; False if it can be taken now."""
        if self._joined is None or isinstance(received.body, Joined | AllAdopted):
            return False
        self._deferred.append(received)
        return True

    def note_joined(self, peer: str, body: Joined) -> None:
        """A stage has switched."""
        if self._joined is not None:
            self._joined[peer] = body

    def note_all_adopted(self, peer: str) -> None:
        """An old leader hands over no more sequences."""
        self._not_done.discard(peer)

    def advance(self) -> list[Received]:
        """Begin to lead once all stages have joined; returns what was deferred until then."""
        if self._joined is None:
            return []
        assert self._configuration is not None
        if any(stage.worker_id not in self._joined for stage in self._configuration.stages[1:]):
            return []
        self._begin(self._configuration, self._joined)
        deferred, self._deferred = self._deferred, []
        return deferred

    def _begin(self, configuration: Configuration, joined: dict[str, Joined]) -> None:
        self._joined = None
        handover = self._handover
        own = [s for s in self._state.sequences.values() if s.request_id not in handover.pending]
        counts = {name: (body.capacity, body.used) for name, body in joined.items()}
        self._state.configure(followers_of(configuration.stages, handover.old_stages, counts))
        self._exchange.enter(configuration)
        for sequence in own:
            if sequence.phase is Phase.HELD:
                highest = self._state.table.highest_block((sequence.request_id,))
                self._exchange.add(
                    sequence.request_id, handover.old_group, handover.old_stages, highest
                )

    def adopt(self, peer: str, adopt: Adopt) -> None:
        """Take a sequence over; a repetition is only acknowledged."""
        configuration = self._configuration
        assert configuration is not None
        if not configuration.leads:
            # The sender saw this member lead; the group has changed again since.
            log.warning("%s handed a request to a member that does not lead", peer)
            return
        request_id = adopt.sequence.request.request_id
        fresh = request_id not in self._state.sequences
        if fresh and not self._is_superseded(request_id):
            self._take_over(adopt, configuration)
        self._links.send(peer, Adopted(request_id, len(adopt.sequence.output_ids)))
        if not (fresh and adopt.sequence.blocks):
            return
        if request_id in self._state.sequences:
            self._exchange.add(request_id, adopt.origin, adopt.stages, adopt.highest_block)
        else:
            # It is too large for this leader, and was refused, or nobody wants it any more.
            for stage in adopt.stages:
                self._links.send(stage.worker_id, FreeKv(request_id, whole_table=True))

    def _is_superseded(self, name: str) -> bool:
        """Whether another sequence answers the request here: it was asked for again meanwhile."""
        current = self._serving.names.name_of(request_of(name))
        return current != name and current in self._state.sequences

    def _take_over(self, adopt: Adopt, configuration: Configuration) -> None:
        state = replace(adopt.sequence, arrival_s=self._now_s() - adopt.age_s)
        absent = absent_stages(configuration.stages, adopt.stages)
        name = state.request.request_id
        self._serving.clock.begin(name, self._now_s(), decodes=bool(state.output_ids))
        self._serving.names.adopt(name)
        self._serving.tell(self._state.adopt(state, absent))
        self._serving.news.adopted.append(
            AdoptedRequest(
                request_of(name),
                configuration.group_id,
                configuration.epoch,
                list(state.output_ids),
                state.logprobs,
                state.prompt_logprobs if state.output_ids else None,
            )
        )
