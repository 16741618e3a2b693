"""A member's KV during an exchange: incoming and outgoing transfers, and departing KV.

A member serves the leaders of the requests, which may lead other groups by now. KV of layers that
left the stage is *departing* until its leader frees it. KV of a request that this group's leader
has not mentioned since the last change is *unclaimed*: another group may still fetch it.
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
    seq_id: str
    leader: str


class _Freed(NamedTuple):
    """A report that is due once departed KV is released."""

    peer: str | None  # the leader that sent `FreeKv`; None if no leader did
    seq_id: str = ""
    blocks: int = 0  # freed blocks of the whole table


class StageKv:
    """A member's part in the exchange; transfers are keyed by transfer id."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._departed = False  # the memory still stores KV of layers that left the stage
        self._departing: set[str] = set()  # requests with departing KV
        self._fewer_depart = False  # requests left `_departing` since the last release
        self._held: set[str] = set()  # requests whose KV of the last change is still here
        self._unclaimed: set[str] = set()  # requests that no leader here has claimed
        self._expected: dict[str, _Transfer] = {}  # incoming
        self._sending: dict[str, _Transfer] = {}  # outgoing
        self._releases: deque[_Freed] = deque()  # reports for `ReleaseDeparted` in progress

    @property
    def settled(self) -> bool:
        """Whether this member stores no KV of departed layers."""
        return not self._departing and not self._departed

    @property
    def unclaimed(self) -> list[str]:
        """Requests from before the last change that may belong to another group now.

        Their leader has yet to fetch or free their KV. Until then this member must not change
        groups, or it would drop that leader's frames as stale.
        """
        if not self._unclaimed:
            return []
        table, led = self._context.table, self._context.planner.sequences
        return [seq_id for seq_id in self._unclaimed if seq_id in table and seq_id not in led]

    @property
    def has_unclaimed(self) -> bool:
        """Whether there is an unclaimed request, without building the list."""
        table, led = self._context.table, self._context.planner.sequences
        return any(seq_id in table and seq_id not in led for seq_id in self._unclaimed)

    def claim(self, seq_ids: Iterable[str]) -> None:
        """Mark requests as belonging to this worker's group."""
        if self._unclaimed:
            self._unclaimed.difference_update(seq_ids)

    def enter(self, switched: StageSwitched) -> None:
        """Start a configuration: KV of layers that left this stage is departing from now on."""
        seq_ids = self._context.table.seq_ids
        self._departed = switched.departed
        self._unclaimed = set(seq_ids)
        self._departing = set(seq_ids) if switched.departed else set()
        self._fewer_depart = False
        self._held = set(seq_ids)
        self._expected.clear()
        self._sending.clear()
        self._releases.clear()

    # --- incoming KV

    def reserve(self, peer: str, frame: Reserve) -> None:
        """Reserve blocks for a request's KV, and accept its transfers."""
        context = self._context
        if peer != context.worker_id:
            context.change(BlocksAdopted(frame.seq_id, frame.blocks))
        elif frame.seq_id not in context.table:
            return  # this leader reserved its own blocks itself, and the request has ended since
        for transfer_id in frame.transfer_ids:
            self._expected[transfer_id] = _Transfer(frame.seq_id, peer)
        context.send(peer, Reserved(frame.seq_id))

    def blocks_for(self, transfer_id: str, seq_id: str) -> tuple[int, ...]:
        """Block ids for the KV of an incoming transfer; () if it is not expected any more."""
        expected = self._expected.get(transfer_id)
        if expected is None or expected.seq_id != seq_id:
            return ()
        return self._context.table.block_ids(seq_id)

    def take_released(self) -> tuple[str, ...]:
        """Ids of newly released requests, for the next stages; refuses their transfers here."""
        released = self._context.take_freed(ReleasedTaken())
        self.forget(released)
        return released

    def forget(self, released: Iterable[str]) -> None:
        """Refuse transfers from and to requests whose blocks were released.

        Call it before the next event: that may allocate these blocks to other requests, or give
        these requests new blocks.
        """
        seq_ids = frozenset(released)
        self._held -= seq_ids
        self._cancel_sending(seq_ids)
        if not self._departing.isdisjoint(seq_ids):
            self._departing -= seq_ids
            self._fewer_depart = True
        if self._expected:
            self._expected = {
                transfer_id: entry
                for transfer_id, entry in self._expected.items()
                if entry.seq_id not in seq_ids
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
            self._context.send(entry.leader, KvEnded(entry.seq_id, transfer_id, intact))

    # --- outgoing KV

    def send(self, peer: str, frame: SendKv) -> None:
        """Start a transfer in the background, or report its failure if the KV is gone."""
        here = len(self._context.table.block_ids(frame.seq_id))
        if frame.seq_id not in self._held or here < frame.blocks:
            self._context.send(peer, KvEnded(frame.seq_id, frame.transfer_id, intact=False))
            return
        self._sending[frame.transfer_id] = _Transfer(frame.seq_id, peer)
        self._context.commands.append(
            SendBlocks(frame.transfer_id, frame.seq_id, frame.transfer, frame.blocks)
        )

    def free(self, peer: str, frame: FreeKv) -> None:
        """Free a request's departed KV, and with `whole_table` all its blocks."""
        context, seq_id = self._context, frame.seq_id
        self._unclaimed.discard(seq_id)
        self._departing.discard(seq_id)
        if frame.whole_table:
            self._held.discard(seq_id)
        self._cancel_sending((seq_id,))
        blocks = len(context.table.block_ids(seq_id)) if frame.whole_table else 0
        if blocks:
            context.change(BlocksReleased(seq_id))
        freed = _Freed(peer, seq_id, blocks)
        # Report after the memory has released its chunks: only then the capacity is known.
        if self._departed:
            self._release(freed)
        else:
            self._report_freed(freed, grown=False)

    def release_unclaimed(self) -> int:
        """Free the KV of unclaimed requests, which have no leader; returns the freed blocks."""
        gone, table = self.unclaimed, self._context.table
        self._unclaimed.clear()
        self._held.difference_update(gone)
        blocks = sum(len(table.block_ids(seq_id)) for seq_id in gone)
        for seq_id in gone:
            self._context.change(BlocksReleased(seq_id))
        return blocks

    def release_everything(self) -> None:
        """Free all blocks: no request of this member can continue with its KV."""
        for seq_id in self._context.table.seq_ids:
            self._context.change(BlocksReleased(seq_id))

    def sweep(self) -> None:
        """Release the KV of departing requests that ended meanwhile; the last step of a turn."""
        table = self._context.table
        self._unclaimed.intersection_update(table.seq_ids)
        if not self._departed:
            return
        gone = [seq_id for seq_id in self._departing if seq_id not in table]
        if gone or self._fewer_depart or not self._departing:
            self._cancel_sending(gone)
            self._departing.difference_update(gone)
            self._fewer_depart = False
            self._release(_Freed(None))

    def note_released(self, answer: DepartedReleased) -> None:
        """Grow the pool by the chunks that departed KV has freed, and send the due report."""
        self._departed = answer.departed
        grown = answer.blocks > self._context.table.pool.num_blocks
        if grown:
            self._context.change(PoolGrown(answer.blocks))
        self._report_freed(self._releases.popleft(), grown)

    def _cancel_sending(self, seq_ids: Collection[str]) -> None:
        """Cancel outgoing transfers of these requests: their blocks may be reused at once."""
        for transfer_id, entry in self._sending.items():
            if entry.seq_id in seq_ids:
                self._context.commands.append(CancelTransfer(transfer_id))

    def _release(self, freed: _Freed) -> None:
        # Departed layers share block ids: memory above the highest id in use can be unmapped.
        self._releases.append(freed)
        needed = self._context.highest_block(self._departing) + 1
        self._context.commands.append(ReleaseDeparted(needed))

    def _report_freed(self, freed: _Freed, grown: bool) -> None:
        context = self._context
        capacity = context.capacity
        if freed.peer is not None:
            context.send(freed.peer, KvFreed(freed.seq_id, capacity))
        if context.leads:
            return
        # `KvFreed` reports the capacity only to its own leader; this group's must learn it as well.
        freed_for_other = freed.peer is not None and freed.peer != context.leader
        if freed_for_other or (freed.peer is None and grown):
            context.send(context.leader, Capacity(capacity))
        if freed.blocks:
            # No leader counts these blocks for a sequence any more, not even if it sent `FreeKv`:
            # it no longer has the request, or never adopted it.
            context.send(context.leader, ForeignBlocksFreed(freed.blocks))
