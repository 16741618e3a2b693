"""Assigns waiting requests to groups, and repeats assignments; see `start_choice`."""

from dataclasses import dataclass, replace

from services.core.ask import NO_PREFIX
from services.core.destination import Destination
from services.core.request import admission_blocks
from services.core.scheduler.assignments import Assigned, Assignments, Totals
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.group_table import GroupTable, ModelGroups
from services.core.scheduler.lengths import keys_of
from services.core.scheduler.queue import Waiting, WaitQueue
from services.core.scheduler.rate import ClassRates
from services.core.scheduler.start_choice import StartChoice
from services.core.scheduler.vocabulary import (
    Asked,
    RequestPlaced,
    SendAssignment,
    ServingGroup,
)
from services.core.service import ServiceClass

REQUEUES_MAX = 3
"""How often workers may return a request to the queue; later assignments are not returnable."""


@dataclass(frozen=True, slots=True)
class Assigner:
    """Assigns requests of the caller's queue to groups; `predicts`: waits are predicted."""

    queue: WaitQueue
    groups: GroupTable
    rules: ClassRules
    overtaken_max: int
    predicts: bool
    # Recent assignments, for repeated asks; dispatch rates over all models; counters for metrics.
    assignments: Assignments
    rates: ClassRates
    totals: Totals

    def next_start(
        self, name: str, model: ModelGroups, now_s: float
    ) -> tuple[Waiting, GroupLoad] | None:
        """The request for the model `name` that starts now, and its group; None if none may."""
        if self.queue.plan_is_due(name):
            longest = model.index.tokens_max or 0
            self.queue.plan_buckets(name, model.bucket_tokens, longest)
        return StartChoice(self.queue, self.rules, name, model, self.overtaken_max, now_s).choose()

    def assign(
        self, waiting: Waiting, load: GroupLoad, model: ModelGroups, now_s: float
    ) -> SendAssignment:
        """Assign a waiting request to a group with room for it."""
        ask, group = waiting.ask, load.group
        self.queue.start(ask.request_id)
        if waiting.place:
            load.bucketed_length = waiting.length
        tokens_max = ask.prompt_tokens + ask.max_tokens
        # Reserve the first blocks only: a running request allocates more, and may be preempted.
        blocks = admission_blocks(ask.prompt_tokens, tokens_max, group.block_size)
        computed = model.reserve(load, ask, blocks, now_s)
        hand_to = None
        if now_s >= waiting.alone_until_s:
            hand_to = model.reserve_target(load, ask, computed, now_s)
        self.totals.prompt_tokens += ask.prompt_tokens
        self.totals.cached_tokens += ask.prompt_tokens - computed
        self.assignments.remember(
            ask.request_id,
            Assigned(
                *(group.group_id, group.epoch, waiting.arrival_s, now_s, waiting.requeues),
                *(waiting.raw_s, ask.service.service_class, keys_of(ask) if self.predicts else ()),
                *(ask.prompt_tokens, waiting.booked),
                hand_to=hand_to,
                prefix=ask.prefix if hand_to is not None else NO_PREFIX,
            ),
        )
        if self.predicts and ask.service.service_class is ServiceClass.INTERACTIVE:
            model.meter.waits.interactive.start(ask.request_id, now_s)
        if now_s < waiting.alone_until_s:
            load.make_exclusive(ask.request_id, now_s)
        self.rates.note(ask.service.service_class, now_s)
        model.meter.dispatched.note(ask.service.service_class, now_s)
        if not self.rules.is_batch(ask.service):
            model.meter.note_start(waiting.start_tokens, now_s)
            expected = model.meter.waits.expected_output(ask)
            model.meter.mix.note(computed, expected, ask.service.tpot_s, now_s)
        self.totals.assigned += 1
        return self._assignment(
            *(waiting.stream_id, ask.request_id, group, waiting.requeues), hand_to
        )

    def repeat(self, ask: Asked, remembered: Assigned) -> SendAssignment | None:
        """Repeat the remembered assignment, or forget it and return None if it is invalid.

        An assignment is invalid once it has failed or its group has moved to another epoch.
        """
        failed, load = ask.failed, self.groups.at_epoch(*remembered.group_and_epoch)
        if load is not None:
            if failed is None or (failed.group_id, failed.epoch) != remembered.group_and_epoch:
                group, requeues = load.group, remembered.requeues
                return self._assignment(
                    *(ask.stream_id, ask.request_id, group, requeues), remembered.hand_to
                )
            if not failed.returned:
                # The worker is dead, or at a newer epoch than the known group: without this, the
                # next dispatch would choose the same group again.
                self.groups.forget_report(load)
        self.forget(ask.request_id)
        return None

    def place(self, placed: RequestPlaced) -> None:
        """Note that a request runs at another group now; no effect if it is not remembered.

        Otherwise its earlier assignment would be repeated if it fails at that group.
        """
        assigned = self.assignments.get(placed.request_id)
        if assigned is None:
            return
        self._release(placed.request_id, assigned)
        if assigned.hand_to is not None and assigned.hand_to.group_id == placed.group_id:
            self.groups.note_moved(placed.group_id, assigned.prefix)
        moved = replace(assigned, group_id=placed.group_id, epoch=placed.epoch)
        self.assignments.replace(placed.request_id, replace(moved, hand_to=None, prefix=NO_PREFIX))

    def suspend_failed_group(self, ask: Asked) -> None:
        """Stop dispatch to the group whose worker lost a request, until its next load report.

        The gateway may know an older epoch. If the group has another leader by now, that leader
        gets no requests until its next report, which is due within about a second.
        """
        failed = ask.failed
        if failed is None or failed.returned:
            return
        if (load := self.groups.of_id(failed.group_id)) is not None:
            self.groups.forget_report(load)

    def forget(self, request_id: str) -> None:
        """Forget the assignment of a request, and release its reservations, if any."""
        assigned = self.assignments.forget(request_id)
        if assigned is not None:
            self._release(request_id, assigned)

    def _release(self, request_id: str, assigned: Assigned) -> None:
        self.groups.release(assigned.group_id, request_id)
        if assigned.hand_to is not None:
            self.groups.release(assigned.hand_to.group_id, request_id)

    def _assignment(
        self,
        stream_id: int,
        request_id: str,
        group: ServingGroup,
        requeues: int,
        hand_to: Destination | None,
    ) -> SendAssignment:
        model = self.groups.of_model(group.model)
        # Returning a request helps only if another group might take it.
        has_others = model is not None and len(model.index.loads) > 1
        return SendAssignment(
            request_id,
            group.group_id,
            group.epoch,
            group.worker_id,
            group.address,
            returnable=has_others and requeues < REQUEUES_MAX,
            hand_to=hand_to,
            stream_id=stream_id,
        )
