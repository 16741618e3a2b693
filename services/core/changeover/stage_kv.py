"""A member's KV while layers change hands: what leaves, what comes, and to which leader it belongs.

It serves the leaders of these requests, which may lead other groups by now. KV of layers that the
stage does not run any more is *departing* until its leader frees it. KV of a request that no leader
here has spoken of since the last change is *unclaimed*: another group may still fetch it.
"""

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from services.core.changeover.frames import (
    Capacity,
    ForeignBlocksFreed,
    FreeKv,
    KvEnded,
    KvFreed,
    Reserve,
    Reserved,
    SendKv,
)
from services.core.changeover.member_context import MemberContext
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.changeover.vocabulary import (
    CancelTransfer,
    DepartedReleased,
    ReleaseDeparted,
    SendBlocks,
    StageSwitched,
)
from services.core.planner.configuration_events import (
    BlocksAdopted,
    BlocksReleased,
    PoolGrown,
    ReleasedTaken,
)


class _Transfer(NamedTuple):
    request_id: str
    leader: str


class _Freed(NamedTuple):
    """What is to be told once departed KV is released; `peer` is None if nobody asked."""

    peer: str | None
    request_id: str = ""
    blocks: int = 0


class StageKv:
    """One member's part in the exchange."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._departed = False
        self._departing: set[str] = set()
        self._fewer_depart = False  # since KV of them was released last
        self._held: set[str] = set()  # requests whose KV of the last change is here still
        self._unclaimed: set[str] = set()
        self._expected: dict[str, _Transfer] = {}
        self._sending: dict[str, _Transfer] = {}
        self._releases: deque[_Freed] = deque()

    @property
    def settled(self) -> bool:
        """Whether no KV of departed layers is kept here any more."""
        return not self._departing and not self._departed

    @property
    def unclaimed(self) -> list[str]:
        """Requests that were here before the last change and may be another group's now.

        Their leader has yet to fetch their KV, or to give it up. Until then this member must not
        change groups: the frames of that leader would be stale.
        """
        if not self._unclaimed:
            return []
        table, led = self._context.table, self._context.planner.sequences
        return [name for name in self._unclaimed if name in table and name not in led]

    @property
    def has_unclaimed(self) -> bool:
        """Whether there is one; stops at the first."""
        table, led = self._context.table, self._context.planner.sequences
        return any(name in table and name not in led for name in self._unclaimed)

    def claim(self, request_ids: Iterable[str]) -> None:
        """These requests belong to this worker's group."""
        if self._unclaimed:
            self._unclaimed.difference_update(request_ids)

    def enter(self, switched: StageSwitched) -> None:
        """Begin a configuration: KV of layers that this stage does not run departs."""
        names = self._context.table.request_ids
        self._departed = switched.departed
        self._unclaimed = set(names)
        self._departing = set(names) if switched.departed else set()
        self._fewer_depart = False
        self._held = set(names)
        self._expected.clear()
        self._sending.clear()
        self._releases.clear()

    # --- KV that comes

    def reserve(self, peer: str, frame: Reserve) -> None:
        """Have the blocks ready, and take the transfers."""
        context = self._context
        if peer != context.worker_id:
            context.change(BlocksAdopted(frame.request_id, frame.blocks))
        elif frame.request_id not in context.table:
            return  # it ended since this leader took the blocks itself
        for transfer_id in frame.transfer_ids:
            self._expected[transfer_id] = _Transfer(frame.request_id, peer)
        context.send(peer, Reserved(frame.request_id))

    def blocks_for(self, transfer_id: str, request_id: str) -> tuple[int, ...]:
        """Where KV of a transfer is to be stored; () if it is not expected any more."""
        expected = self._expected.get(transfer_id)
        if expected is None or expected.request_id != request_id:
            return ()
        return self._context.table.block_ids(request_id)

    def take_released(self) -> tuple[str, ...]:
        """Names of released requests, for the next stages; transfers for them are refused here."""
        released = self._context.take_freed(ReleasedTaken())
        self.forget(released)
        return released

    def forget(self, released: Iterable[str]) -> None:
        """Refuse transfers to and from requests whose blocks were released.

        Call it before another event, which may give these blocks to other requests, or to these.
        """
        names = frozenset(released)
        self._held -= names
        self._cancel_sending(names)
        if not self._departing.isdisjoint(names):
            self._departing -= names
            self._fewer_depart = True
        if self._expected:
            self._expected = {
                transfer_id: entry
                for transfer_id, entry in self._expected.items()
                if entry.request_id not in names
            }

    def note_outcome(self, outcome: TransferOutcome) -> None:
        """Report the end of a transfer from or to this member to the leader that started it."""
        transfer_id, status = outcome.transfer_id, outcome.status
        entry = None
        if status is not TransferStatus.RECEIVED:
            entry = self._sending.pop(transfer_id, None)
        if status is TransferStatus.SENT:
            return  # the receiver reports success: only there is the KV known to be stored
        entry = entry or self._expected.pop(transfer_id, None)
        if entry is not None:
            intact = status is TransferStatus.RECEIVED
            self._context.send(entry.leader, KvEnded(entry.request_id, transfer_id, intact))

    # --- KV that leaves

    def send(self, peer: str, frame: SendKv) -> None:
        """Begin a transfer in the background, unless the request was released meanwhile."""
        here = len(self._context.table.block_ids(frame.request_id))
        if frame.request_id not in self._held or here < frame.blocks:
            self._context.send(peer, KvEnded(frame.request_id, frame.transfer_id, intact=False))
            return
        self._sending[frame.transfer_id] = _Transfer(frame.request_id, peer)
        self._context.commands.append(
            SendBlocks(frame.transfer_id, frame.request_id, frame.transfer, frame.blocks)
        )

    def free(self, peer: str, frame: FreeKv) -> None:
        """Free a request's departed KV, and with `whole_table` the rest."""
        context, name = self._context, frame.request_id
        self._unclaimed.discard(name)
        self._departing.discard(name)
        if frame.whole_table:
            self._held.discard(name)
        self._cancel_sending((name,))
        blocks = len(context.table.block_ids(name)) if frame.whole_table else 0
        if blocks:
            context.change(BlocksReleased(name))
        freed = _Freed(peer, name, blocks)
        if self._departed:
            self._release(freed)
        else:
            self._report_freed(freed, grown=False)

    def release_unclaimed(self) -> int:
        """Free KV of requests that no leader has, which none can fetch now; returns the blocks."""
        gone, table = self.unclaimed, self._context.table
        self._unclaimed.clear()
        self._held.difference_update(gone)
        blocks = sum(len(table.block_ids(name)) for name in gone)
        for name in gone:
            self._context.change(BlocksReleased(name))
        return blocks

    def release_everything(self) -> None:
        """No request of this member goes on."""
        for name in self._context.table.request_ids:
            self._context.change(BlocksReleased(name))

    def sweep(self) -> None:
        """Notice departing requests that have ended meanwhile; as the last of a turn."""
        table = self._context.table
        self._unclaimed.intersection_update(table.request_ids)
        if not self._departed:
            return
        gone = [name for name in self._departing if name not in table]
        if gone or self._fewer_depart or not self._departing:
            self._cancel_sending(gone)
            self._departing.difference_update(gone)
            self._fewer_depart = False
            self._release(_Freed(None))

    def note_released(self, answer: DepartedReleased) -> None:
        """The memory has taken departed KV for the layers that stay."""
        self._departed = answer.departed
        grown = answer.blocks > self._context.table.pool.num_blocks
        if grown:
            self._context.change(PoolGrown(answer.blocks))
        self._report_freed(self._releases.popleft(), grown)

    def _cancel_sending(self, request_ids: Collection[str]) -> None:
        """What is still to be read of their KV is not theirs any more."""
        for transfer_id, entry in self._sending.items():
            if entry.request_id in request_ids:
                self._context.commands.append(CancelTransfer(transfer_id))

    def _release(self, freed: _Freed) -> None:
        self._releases.append(freed)
        needed = self._context.highest_block(self._departing) + 1
        self._context.commands.append(ReleaseDeparted(needed))

    def _report_freed(self, freed: _Freed, grown: bool) -> None:
        context = self._context
        capacity = context.capacity
        if freed.peer is not None:
            context.send(freed.peer, KvFreed(freed.request_id, capacity))
        if context.leads:
            return
        asked_by_another = freed.peer is not None and freed.peer != context.leader
        if asked_by_another or (freed.peer is None and grown):
            context.send(context.leader, Capacity(capacity))
        if freed.blocks:
            # Even a leader that asked counts these blocks for none of its sequences: it has the
            # request no more, or never took it.
            context.send(context.leader, ForeignBlocksFreed(freed.blocks))
