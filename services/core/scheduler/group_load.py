"""What one group carries: its worker's latest report, and assignments not yet seen in one."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from services.core.report import LoadReport
from services.core.scheduler.vocabulary import LoadReported, ServingGroup

REPORT_FRESH_S = 3.0
RESERVATION_S = 5.0
GROWTH_BLOCKS = 0.5
AHEAD_ITERATIONS = 2
"""Iterations of prompts that a group may have before it for a request that has run to join them."""
KEPT_S = 10.0
"""Longest that a group takes nothing beside a request that is to be alone."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    blocks: int
    lapses_s: float
    prefill_tokens: int
    batch: bool


@dataclass(slots=True)
class GroupLoad:
    """Load of a group at its present epoch.

    A reservation holds blocks for an assignment until a report names its request as received. It
    lapses after `RESERVATION_S`, since the gateway or its client may have gone. `growth_blocks` are
    kept for each running request: a request that started in them would soon make another one lose
    its KV.
    """

    group: ServingGroup
    growth_blocks: float = GROWTH_BLOCKS
    _report: LoadReport | None = None
    _reserved: OrderedDict[str, _Reservation] = field(default_factory=OrderedDict)  # by lapse
    reserved_blocks: int = 0
    _reserved_tokens: int = 0
    _reserved_batch: int = 0
    _reserved_batch_blocks: int = 0
    # The worker flaps: other groups are chosen before this one.
    flaps: bool = False
    # Takes batch requests only, or none of them; None: all requests.
    for_batch: bool | None = None
    # The largest number that a report had, and when the worker itself last reported at this epoch.
    _newest: int = 0
    _heard_s: float = -math.inf
    _spoken_s: float = math.inf  # at whatever epoch
    # A request that is to be alone here, and until when at most.
    _kept_for: str = ""
    _kept_until_s: float = -math.inf

    def note_report(self, reported: LoadReported) -> bool:
        """Take a report of this group's worker; returns whether its load counts from now on.

        A report at another epoch stops the group from taking requests: the worker would refuse
        them. From an out-of-order report only `received_request_ids` are used. A report that a
        gateway passed on counts only while the worker itself reports.
        """
        report, passed_on = reported.report, reported.passed_on
        if self._report is None and passed_on:
            return False
        for request_id in report.received_request_ids:
            self.release(request_id)
        current = report.epoch == self.group.epoch
        if not passed_on:
            self._spoken_s = reported.now_s
        if current and not passed_on:
            self._heard_s = reported.now_s
        if report.number <= self._newest:
            return False
        self._newest = report.number
        self._report = report if current else None
        if current and self._kept_for not in self._reserved and not report.load.prefill_tokens:
            self._kept_for = ""  # it has run: what it does to an engine has been done
        return current

    def forget_report(self) -> None:
        """Take nothing until the next report: the worker refused this epoch, or may be gone."""
        self._report = None

    def is_fresh(self, now_s: float) -> bool:
        """Whether the worker has reported at this epoch within `REPORT_FRESH_S`."""
        return self._report is not None and now_s - self._heard_s <= REPORT_FRESH_S

    @property
    def is_idle(self) -> bool:
        """Whether no request runs, waits or is on its way, as last reported."""
        return self._report is not None and self.sequences == 0

    def keep_for(self, request_id: str, now_s: float) -> None:
        """Take nothing beside a request that is on its way, until it has a token."""
        self._kept_for, self._kept_until_s = request_id, now_s + KEPT_S

    def is_kept(self, now_s: float) -> bool:
        """Whether another request is to be alone here."""
        return bool(self._kept_for) and now_s < self._kept_until_s

    def is_silent(self, now_s: float) -> bool:
        """Whether its worker has reported, at whatever epoch, but not lately."""
        return now_s - self._spoken_s > REPORT_FRESH_S

    @property
    def capacity_blocks(self) -> int:
        """KV blocks in all, as last reported: parameters ebb and come back."""
        reported = self._report.load.kv_blocks_total if self._report is not None else 0
        return reported or self.group.capacity_blocks

    @property
    def tokens_max(self) -> int:
        """Longest sequence that can ever run: alone in the group, or in its leader by itself."""
        blocks = max(self.capacity_blocks, self.group.capacity_blocks)
        return min(self.group.max_model_len, blocks * self.group.block_size)

    @property
    def room_blocks(self) -> int:
        """Blocks for online requests: free or yielded by batch ones, and nobody waits for them.

        Negative when the worker is overcommitted.
        """
        if self._report is None:
            return 0
        load = self._report.load
        free = min(load.kv_blocks_free + load.kv_blocks_yielding, self.capacity_blocks)
        return free - load.kv_blocks_wanted - self.reserved_blocks

    @property
    def awaited_blocks(self) -> int:
        """Blocks for online requests that have not begun there; 0 where batch ones do not yield."""
        if self._report is None or not self._report.load.batch_yields:
            return 0
        return (
            self._report.load.kv_blocks_wanted + self.reserved_blocks - self._reserved_batch_blocks
        )

    @property
    def start_blocks(self) -> int:
        """Blocks in which an online request may start: running ones keep some of the room to grow.

        Running batch requests that yield keep none.
        """
        if self._report is None:
            return 0
        return self.room_blocks - math.ceil(self.growth_blocks * self.running)

    @property
    def batch_start_blocks(self) -> int:
        """Blocks in which a request of the class `batch` may start: it makes nobody yield."""
        if self._report is None:
            return 0
        load = self._report.load
        growing = math.ceil(self.growth_blocks * load.batch_running) if load.batch_yields else 0
        return self.start_blocks - load.kv_blocks_yielding - growing

    @property
    def sequences(self) -> int:
        """Sequences that run, wait or are on their way."""
        report = self._report
        reported = report.load.running + report.load.waiting if report is not None else 0
        return reported + len(self._reserved)

    @property
    def online_sequences(self) -> int:
        """As `sequences`, without batch ones if those yield."""
        if self._report is None or not self._report.load.batch_yields:
            return self.sequences
        load = self._report.load
        return self.sequences - load.batch_running - load.batch_waiting - self._reserved_batch

    @property
    def online_waiting(self) -> int:
        """Sequences that wait for blocks and are not batch ones, as last reported."""
        if self._report is None:
            return 0
        return self._report.load.waiting - self._report.load.batch_waiting

    @property
    def running(self) -> int:
        """Sequences that run and do not yield, as last reported."""
        if self._report is None:
            return 0
        load = self._report.load
        return load.running - load.batch_running if load.batch_yields else load.running

    @property
    def used_tokens(self) -> int:
        """Token slots in blocks that sequences have and do not yield, as last reported."""
        if self._report is None:
            return 0
        load = self._report.load
        free = min(load.kv_blocks_free + load.kv_blocks_yielding, self.capacity_blocks)
        return (self.capacity_blocks - free) * self.group.block_size

    @property
    def prefill_tokens(self) -> int:
        """Tokens that are to be prefilled there, of requests on their way, too."""
        reported = self._report.load.prefill_tokens if self._report is not None else 0
        return reported + self._reserved_tokens

    @property
    def tokens_ahead(self) -> int:
        """Tokens that are prefilled before those of a new request that does not yield.

        Beside batch requests that yield that is an estimate: a report does not tell whose prompts
        are to be prefilled, so each sequence has the same part of them.
        """
        load = self._report.load if self._report is not None else None
        if load is None or not load.batch_yields or not load.prefill_tokens:
            return self.prefill_tokens
        every = load.running + load.waiting
        online = every - load.batch_running - load.batch_waiting
        return load.prefill_tokens * online // max(1, every) + self._reserved_tokens

    @property
    def is_behind(self) -> bool:
        """Whether requests that wait to go on had better wait for another group.

        It has several iterations of prompts before it, those of batch requests that yield aside:
        beside some of these nobody knows how much there is, beyond what is on its way.
        """
        load = self._report.load if self._report is not None else None
        beside_batch = load is not None and load.batch_yields
        if beside_batch and load is not None and load.batch_running + load.batch_waiting:
            tokens = self._reserved_tokens
        else:
            tokens = self.prefill_tokens
        group = self.group
        return tokens >= AHEAD_ITERATIONS * group.members * group.max_batch_tokens

    def reserve(
        self,
        request_id: str,
        blocks: int,
        now_s: float,
        prefill_tokens: int = 0,
        batch: bool = False,
    ) -> float:
        """Hold blocks for a new assignment, of which so many tokens are to be prefilled.

        `batch`: it yields to online requests. Returns when that lapses.
        """
        self.release(request_id)
        lapses_s = now_s + RESERVATION_S
        self._reserved[request_id] = _Reservation(blocks, lapses_s, prefill_tokens, batch)
        self.reserved_blocks += blocks
        self._reserved_batch += batch
        self._reserved_batch_blocks += batch * blocks
        self._reserved_tokens += prefill_tokens
        return lapses_s

    def release(self, request_id: str) -> None:
        """Drop a reservation; no effect if there is none."""
        reservation = self._reserved.pop(request_id, None)
        if reservation is not None:
            self.reserved_blocks -= reservation.blocks
            self._reserved_tokens -= reservation.prefill_tokens
            self._reserved_batch -= reservation.batch
            self._reserved_batch_blocks -= reservation.batch * reservation.blocks

    def drop_lapsed(self, now_s: float) -> None:
        """Drop the reservations whose time is over."""
        while self._reserved:
            request_id, reservation = next(iter(self._reserved.items()))
            if reservation.lapses_s > now_s:
                return
            self.release(request_id)

    def check_invariants(self) -> None:
        """Raise AssertionError if the sum of reservations is wrong."""
        assert self.reserved_blocks == sum(r.blocks for r in self._reserved.values())
        assert self._reserved_tokens == sum(r.prefill_tokens for r in self._reserved.values())
        batch = [r for r in self._reserved.values() if r.batch]
        assert self._reserved_batch == len(batch)
        assert self._reserved_batch_blocks == sum(r.blocks for r in batch)
        assert all(r.blocks > 0 for r in self._reserved.values())
        assert self._report is None or self._report.incarnation == self.group.incarnation
