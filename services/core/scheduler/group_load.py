"""The load of a worker group as the scheduler knows it, from reports and own assignments.

It combines the latest load report of the group's leader with reservations: KV blocks of assignments
that no report includes yet. An epoch numbers the configurations of a group. Batch requests yield
their blocks to online requests (all other classes) if the report has `batch_yields`; the comments
call them preemptible. A resumed request has run on another worker and must recompute its KV.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from services.core.adapter import NO_ADAPTERS, Adapter, AdapterUse
from services.core.report import LoadReport
from services.core.scheduler.vocabulary import LoadReported, ServingGroup

REPORT_FRESH_S = 3.0
"""Maximum age of the load report of a group that gets requests."""
RESERVATION_S = 5.0
"""Lifetime of a reservation."""
GROWTH_BLOCKS = 0.5
"""Default of the setting `growth_blocks`."""
BACKLOG_ITERATIONS = 2
"""Prefill iterations ahead from which a group is backlogged, so that resumed requests avoid it."""
ONLINE_SLOTS = 0.25
"""Share of the sequences of a worker with `sequences_max` that batch requests leave free."""
EXCLUSIVE_S = 10.0
"""Longest time for which a request with `alone`, which may crash the engine, runs exclusively."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    """An assignment that no load report contains yet."""

    blocks: int
    expires_s: float
    prefill_tokens: int
    batch: bool
    adapter: Adapter | None


@dataclass(slots=True)
class GroupLoad:
    """Load of a group at its current epoch.

    A reservation holds blocks for an assignment until a report lists its request as received. It
    expires after `RESERVATION_S`, since the gateway may never send the request.
    """

    group: ServingGroup
    # Blocks kept free per running request for its growth. A new request in them would soon cause
    # a preemption.
    growth_blocks: float = GROWTH_BLOCKS
    # Tokens of prefill backlog from which further requests wait in the queue; see `timely_room`.
    held_tokens: float = math.inf
    # The latest report, None unless it is of the current epoch.
    _report: LoadReport | None = None
    # Reservations by request id, in order of expiry; below, sums over all and over batch requests.
    _reserved: OrderedDict[str, _Reservation] = field(default_factory=OrderedDict)
    reserved_blocks: int = 0
    _reserved_tokens: int = 0
    _reserved_batch: int = 0
    _reserved_batch_blocks: int = 0
    # The worker has left and returned often (flapping), so other groups are preferred.
    flaps: bool = False
    # Which requests the group takes: True: batch only, False: online only, None: all.
    for_batch: bool | None = None
    # Length of the last assigned request that buckets order, prompt and expected output; 0: none.
    bucketed_length: int = 0
    # Highest report number so far, to ignore reports that arrive out of order.
    _newest_number: int = 0
    # Latest report from the worker itself, not a gateway: at this epoch (-inf: none), and at any
    # epoch (inf: none).
    _reported_s: float = -math.inf
    _reported_any_epoch_s: float = math.inf
    # Id of a request that runs here exclusively ("": none), and when exclusivity ends.
    _exclusive_for: str = ""
    _exclusive_until_s: float = -math.inf

    def note_report(self, reported: LoadReported) -> bool:
        """Apply a load report of this group's leader; returns whether its load replaces the last.

        A report of another epoch stops dispatch to the group, since the worker would refuse
        requests. Of an out-of-order report only `received_request_ids` are used. A report that a
        gateway forwarded is ignored unless an earlier report is in use.
        """
        report, passed_on = reported.report, reported.passed_on
        if self._report is None and passed_on:
            return False
        for request_id in report.received_request_ids:
            self.release(request_id)
        current = report.epoch == self.group.epoch
        if not passed_on:
            self._reported_any_epoch_s = reported.now_s
        if current and not passed_on:
            self._reported_s = reported.now_s
        # Reports arrive from the worker and through gateways: ignore those that are out of order.
        if report.number <= self._newest_number:
            return False
        self._newest_number = report.number
        self._report = report if current else None
        if current and self._exclusive_for not in self._reserved and not report.load.prefill_tokens:
            # The prefill of the exclusive request is over, so it is unlikely to crash the engine.
            self._exclusive_for = ""
        return current

    def forget_report(self) -> None:
        """Stop dispatch until the next report, as the worker refused this epoch or may be dead."""
        self._report = None

    def is_fresh(self, now_s: float) -> bool:
        """Whether the worker itself has reported at this epoch within `REPORT_FRESH_S`."""
        return self._report is not None and now_s - self._reported_s <= REPORT_FRESH_S

    @property
    def is_idle(self) -> bool:
        """Whether no request runs, waits or is reserved, by the last report."""
        return self._report is not None and self.sequences == 0

    @property
    def reported_idle(self) -> bool:
        """Whether no request runs or waits by the last report, regardless of reservations."""
        report = self._report
        return report is not None and not report.load.running and not report.load.waiting

    def make_exclusive(self, request_id: str, now_s: float) -> None:
        """Admit no other request until its prefill is over, for at most `EXCLUSIVE_S`."""
        self._exclusive_for, self._exclusive_until_s = request_id, now_s + EXCLUSIVE_S

    def is_exclusive(self, now_s: float) -> bool:
        """Whether a request runs here exclusively."""
        return bool(self._exclusive_for) and now_s < self._exclusive_until_s

    def is_silent(self, now_s: float) -> bool:
        """Whether the worker has reported before, at any epoch, but not within `REPORT_FRESH_S`."""
        return now_s - self._reported_any_epoch_s > REPORT_FRESH_S

    @property
    def capacity_blocks(self) -> int:
        """Total KV blocks by the last report; dropping and restoring layers changes them."""
        reported = self._report.load.kv_blocks_total if self._report is not None else 0
        return reported or self.group.capacity_blocks

    @property
    def tokens_max(self) -> int:
        """Longest sequence in tokens that can run alone: here, or in the leader after a split."""
        blocks = max(self.capacity_blocks, self.group.capacity_blocks)
        return min(self.group.max_model_len, blocks * self.group.block_size)

    @property
    def room_blocks(self) -> int:
        """Blocks available to online requests: free or preemptible, less awaited and reserved.

        Negative if more blocks are awaited and reserved than available.
        """
        if self._report is None:
            return 0
        load = self._report.load
        free = min(load.kv_blocks_free + load.kv_blocks_yielding, self.capacity_blocks)
        return free - load.kv_blocks_wanted - self.reserved_blocks

    @property
    def awaited_blocks(self) -> int:
        """Blocks that admitted online requests wait for; 0 if batch work is not preemptible."""
        if self._report is None or not self._report.load.batch_yields:
            return 0
        return (
            self._report.load.kv_blocks_wanted + self.reserved_blocks - self._reserved_batch_blocks
        )

    @property
    def is_full(self) -> bool:
        """Whether as many sequences run, wait or are reserved as the worker takes at once."""
        most = self._report.load.sequences_max if self._report is not None else 0
        return 0 < most <= self.sequences

    @property
    def is_full_for_batch(self) -> bool:
        """Whether batch requests run, wait or are reserved in all but the slots kept for others."""
        most = self._report.load.sequences_max if self._report is not None else 0
        if not most or self._report is None:
            return False
        kept = min(most - 1, max(1, int(most * ONLINE_SLOTS)))
        load = self._report.load
        return load.batch_running + load.batch_waiting + self._reserved_batch >= most - kept

    @property
    def adapter_use(self) -> AdapterUse:
        """The leader's adapters and slots by the last report."""
        return NO_ADAPTERS if self._report is None else self._report.load.adapter_use

    @property
    def reserved_adapters(self) -> frozenset[int]:
        """Keys of the adapters of reservations."""
        return frozenset(
            reservation.adapter.key
            for reservation in self._reserved.values()
            if reservation.adapter is not None
        )

    @property
    def start_blocks(self) -> int:
        """Blocks in which an online request may start: room less the growth of running requests.

        Preemptible batch requests keep no blocks for their growth.
        """
        if self._report is None:
            return 0
        blocks = self.room_blocks - math.ceil(self.growth_blocks * self.running)
        return min(blocks, 0) if self.is_full else blocks

    @property
    def batch_start_blocks(self) -> int:
        """Blocks in which a batch request may start without taking the growth of other requests."""
        if self._report is None:
            return 0
        load = self._report.load
        # Batch requests occupy the preemptible blocks, and need blocks for their own growth too.
        growing = math.ceil(self.growth_blocks * load.batch_running) if load.batch_yields else 0
        blocks = self.start_blocks - load.kv_blocks_yielding - growing
        return min(blocks, 0) if self.is_full_for_batch else blocks

    @property
    def sequences(self) -> int:
        """Sequences that run, wait or are reserved."""
        report = self._report
        reported = report.load.running + report.load.waiting if report is not None else 0
        return reported + len(self._reserved)

    @property
    def online_sequences(self) -> int:
        """As `sequences`, without preemptible batch sequences."""
        if self._report is None or not self._report.load.batch_yields:
            return self.sequences
        load = self._report.load
        return self.sequences - load.batch_running - load.batch_waiting - self._reserved_batch

    @property
    def online_waiting(self) -> int:
        """Online sequences that wait for blocks, by the last report."""
        if self._report is None:
            return 0
        return self._report.load.waiting - self._report.load.batch_waiting

    @property
    def running(self) -> int:
        """Running sequences that are not preemptible, by the last report."""
        if self._report is None:
            return 0
        load = self._report.load
        return load.running - load.batch_running if load.batch_yields else load.running

    @property
    def used_tokens(self) -> int:
        """Token slots in allocated blocks that are not preemptible, by the last report."""
        if self._report is None:
            return 0
        load = self._report.load
        free = min(load.kv_blocks_free + load.kv_blocks_yielding, self.capacity_blocks)
        return (self.capacity_blocks - free) * self.group.block_size

    @property
    def batch_tokens(self) -> int:
        """Token slots that batch requests use or could use: all but those of online requests."""
        return max(0, self.capacity_blocks * self.group.block_size - self.used_tokens)

    @property
    def prefill_tokens(self) -> int:
        """Tokens to prefill in the group, including those of reservations."""
        reported = self._report.load.prefill_tokens if self._report is not None else 0
        return reported + self._reserved_tokens

    @property
    def tokens_ahead(self) -> int:
        """Tokens that the group prefills before those of a new online request.

        With preemptible batch requests this is an estimate: a report does not split prefill tokens
        by class, so each sequence is assumed to have the same number.
        """
        load = self._report.load if self._report is not None else None
        if load is None or not load.batch_yields or not load.prefill_tokens:
            return self.prefill_tokens
        every = load.running + load.waiting
        online = every - load.batch_running - load.batch_waiting
        return load.prefill_tokens * online // max(1, every) + self._reserved_tokens

    @property
    def is_backlogged(self) -> bool:
        """Whether `BACKLOG_ITERATIONS` iterations of online prefill are ahead, or more.

        A report does not split prefill tokens by class, so if preemptible batch requests run or
        wait, only the tokens of reservations count.
        """
        load = self._report.load if self._report is not None else None
        beside_batch = load is not None and load.batch_yields
        if beside_batch and load is not None and load.batch_running + load.batch_waiting:
            tokens = self._reserved_tokens
        else:
            tokens = self.prefill_tokens
        group = self.group
        return tokens >= BACKLOG_ITERATIONS * group.members * group.max_batch_tokens

    def has_bucketed_prefill(self, classes: bool) -> bool:
        """Whether the prompt of a request that buckets order may be waiting for its prefill.

        `classes`: buckets order batch requests only.
        """
        load = self._report.load if self._report is not None else None
        if classes and load is not None:
            online = load.running + load.waiting - load.batch_running - load.batch_waiting
            if online > 0:  # the prefill tokens may be theirs
                return load.batch_waiting > 0 or self._reserved_batch > 0
        return self.prefill_tokens > 0

    def reserve(
        self,
        request_id: str,
        blocks: int,
        now_s: float,
        prefill_tokens: int = 0,
        batch: bool = False,
        adapter: Adapter | None = None,
    ) -> float:
        """Reserve blocks for a new assignment with `prefill_tokens` to compute.

        `batch`: it is a batch request; `adapter`: it needs a slot with it. Returns the expiry time
        of the reservation.
        """
        self.release(request_id)
        expires_s = now_s + RESERVATION_S
        self._reserved[request_id] = _Reservation(
            *(blocks, expires_s, prefill_tokens, batch, adapter)
        )
        self.reserved_blocks += blocks
        self._reserved_batch += batch
        self._reserved_batch_blocks += batch * blocks
        self._reserved_tokens += prefill_tokens
        return expires_s

    def release(self, request_id: str) -> None:
        """Remove the reservation of a request; no effect if there is none."""
        reservation = self._reserved.pop(request_id, None)
        if reservation is not None:
            self.reserved_blocks -= reservation.blocks
            self._reserved_tokens -= reservation.prefill_tokens
            self._reserved_batch -= reservation.batch
            self._reserved_batch_blocks -= reservation.batch * reservation.blocks

    def remove_expired(self, now_s: float) -> None:
        """Remove expired reservations."""
        while self._reserved:
            request_id, reservation = next(iter(self._reserved.items()))
            if reservation.expires_s > now_s:
                return
            self.release(request_id)

    def check_invariants(self) -> None:
        """Raise AssertionError if the sums differ from the reservations."""
        assert self.reserved_blocks == sum(r.blocks for r in self._reserved.values())
        assert self._reserved_tokens == sum(r.prefill_tokens for r in self._reserved.values())
        batch = [r for r in self._reserved.values() if r.batch]
        assert self._reserved_batch == len(batch)
        assert self._reserved_batch_blocks == sum(r.blocks for r in batch)
        assert all(r.blocks > 0 for r in self._reserved.values())
        assert self._report is None or self._report.incarnation == self.group.incarnation
