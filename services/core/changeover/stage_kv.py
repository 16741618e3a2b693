"""A member's own KV during an exchange: incoming and outgoing transfers, and departing KV.

After a change of groups, the leader of each sequence has its KV moved. A member executes the
commands of these leaders, which may lead other groups by now. KV of layers that left the member's
stage is *departing* until the leader of its sequence frees it. A sequence from before the change is
*unclaimed* until this group's leader mentions it or another leader frees it: another group may
still fetch its KV.
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
    leader: str  # receives the report of its end


class _FreedReport(NamedTuple):
    """A `KvFreed` that is due once the memory has released departed KV."""

    peer: str | None  # the leader that sent `FreeKv`; None if no leader did
    seq_id: str = ""
    blocks: int = 0  # freed blocks of the whole table


class StageKv:
    """A member's part in the exchange; transfers are keyed by transfer id."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._departed = False  # the memory still stores KV of layers that left the stage
        self._departing: set[str] = set()  # sequences with departing KV
        self._departing_shrank = False  # sequences left `_departing` since the last release
        self._held: set[str] = set()  # sequences from before the change with KV stored here
        self._unclaimed: set[str] = set()  # see the module; some may have ended
        self._expected: dict[str, _Transfer] = {}  # accepted incoming transfers
        self._sending: dict[str, _Transfer] = {}  # outgoing transfers in progress
        self._releases: deque[_FreedReport] = deque()  # an entry per unanswered `ReleaseDeparted`

    @property
    def settled(self) -> bool:
        """Whether this member stores no KV of departed layers."""
        return not self._departing and not self._departed

    @property
    def unclaimed(self) -> list[str]:
        """Sequences from before the last change that may belong to another group now.

        Until their leader has fetched or freed their KV, this member must not change groups:
        otherwise it would discard that leader's frames as stale.
        """
        if not self._unclaimed:
            return []
        table, led = self._context.table, self._context.planner.sequences
        return [seq_id for seq_id in self._unclaimed if seq_id in table and seq_id not in led]

    @property
    def has_unclaimed(self) -> bool:
        """Whether there is an unclaimed sequence; cheaper than `unclaimed`."""
        table, led = self._context.table, self._context.planner.sequences
        return any(seq_id in table and seq_id not in led for seq_id in self._unclaimed)

    def claim(self, seq_ids: Iterable[str]) -> None:
        """Mark sequences as led by this group's leader."""
        if self._unclaimed:
            self._unclaimed.difference_update(seq_ids)

    def enter(self, switched: StageSwitched) -> None:
        """Reset for a new configuration: KV of layers that left this stage is departing now."""
        seq_ids = self._context.table.seq_ids
        self._departed = switched.departed
        self._unclaimed = set(seq_ids)
        self._departing = set(seq_ids) if switched.departed else set()
        self._departing_shrank = False
        self._held = set(seq_ids)
        self._expected.clear()
        self._sending.clear()
        self._releases.clear()

    # --- incoming KV

    def reserve(self, peer: str, frame: Reserve) -> None:
        """Reserve blocks for a sequence's KV, and accept its transfers from now on."""
        context = self._context
        if peer != context.worker_id:
            context.apply(BlocksAdopted(frame.seq_id, frame.blocks))
        elif frame.seq_id not in context.table:
            return  # a leader allocates its own blocks earlier, and the sequence has ended since
        for transfer_id in frame.transfer_ids:
            self._expected[transfer_id] = _Transfer(frame.seq_id, peer)
        context.send(peer, Reserved(frame.seq_id))

    def blocks_for(self, transfer_id: str, seq_id: str) -> tuple[int, ...]:
        """Block ids for the KV of an incoming transfer; () if the transfer is not expected."""
        expected = self._expected.get(transfer_id)
        if expected is None or expected.seq_id != seq_id:
            return ()
        return self._context.table.block_ids(seq_id)

    def take_released(self) -> tuple[str, ...]:
        """Take the ids of newly released sequences for the next stages; end transfers here."""
        released = self._context.take_freed(ReleasedTaken())
        self.forget(released)
        return released

    def forget(self, released: Iterable[str]) -> None:
        """Cancel and refuse transfers of sequences whose blocks were released.

        Call it before the next event, which may allocate these blocks to other sequences, or
        allocate new blocks to these sequences.
        """
        seq_ids = frozenset(released)
        self._held -= seq_ids
        self._cancel_sending(seq_ids)
        if not self._departing.isdisjoint(seq_ids):
            self._departing -= seq_ids
            self._departing_shrank = True
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
            return  # the receiver reports success to the leader, once the KV is stored
        entry = entry or self._expected.pop(transfer_id, None)
        if entry is not None:
            intact = status is TransferStatus.RECEIVED
            self._context.send(entry.leader, KvEnded(entry.seq_id, transfer_id, intact))

    # --- outgoing KV

    def send(self, peer: str, frame: SendKv) -> None:
        """Start a transfer in the background, or report a failure if the KV was released."""
        here = len(self._context.table.block_ids(frame.seq_id))
        if frame.seq_id not in self._held or here < frame.blocks:
            self._context.send(peer, KvEnded(frame.seq_id, frame.transfer_id, intact=False))
            return
        self._sending[frame.transfer_id] = _Transfer(frame.seq_id, peer)
        self._context.commands.append(
            SendBlocks(frame.transfer_id, frame.seq_id, frame.transfer, frame.blocks)
        )

    def free(self, peer: str, frame: FreeKv) -> None:
        """Free a sequence's departed KV, and with `whole_table` all its blocks."""
        context, seq_id = self._context, frame.seq_id
        self._unclaimed.discard(seq_id)
        self._departing.discard(seq_id)
        if frame.whole_table:
            self._held.discard(seq_id)
        self._cancel_sending((seq_id,))
        blocks = len(context.table.block_ids(seq_id)) if frame.whole_table else 0
        if blocks:
            context.apply(BlocksReleased(seq_id))
        freed = _FreedReport(peer, seq_id, blocks)
        # The capacity to report is known only after the memory has released departed KV.
        if self._departed:
            self._release(freed)
        else:
            self._report_freed(freed, grown=False)

    def release_unclaimed(self) -> int:
        """Free the KV of unclaimed sequences, which have no leader; returns the freed blocks."""
        gone, table = self.unclaimed, self._context.table
        self._unclaimed.clear()
        self._held.difference_update(gone)
        blocks = sum(len(table.block_ids(seq_id)) for seq_id in gone)
        for seq_id in gone:
            self._context.apply(BlocksReleased(seq_id))
        return blocks

    def release_everything(self) -> None:
        """Free all blocks: no sequence can continue with its KV."""
        for seq_id in self._context.table.seq_ids:
            self._context.apply(BlocksReleased(seq_id))

    def sweep(self) -> None:
        """Release departed KV that no sequence needs any more; the last step of each turn."""
        table = self._context.table
        self._unclaimed.intersection_update(table.seq_ids)
        if not self._departed:
            return
        gone = [seq_id for seq_id in self._departing if seq_id not in table]
        if gone or self._departing_shrank or not self._departing:
            self._cancel_sending(gone)
            self._departing.difference_update(gone)
            self._departing_shrank = False
            self._release(_FreedReport(None))

    def note_released(self, answer: DepartedReleased) -> None:
        """Grow the block pool by the memory that departed KV has freed, and send the report."""
        self._departed = answer.departed
        grown = answer.blocks > self._context.table.pool.num_blocks
        if grown:
            self._context.apply(PoolGrown(answer.blocks))
        self._report_freed(self._releases.popleft(), grown)

    def _cancel_sending(self, seq_ids: Collection[str]) -> None:
        """Cancel outgoing transfers of these sequences: their blocks may be reused at once."""
        for transfer_id, entry in self._sending.items():
            if entry.seq_id in seq_ids:
                self._context.commands.append(CancelTransfer(transfer_id))

    def _release(self, freed: _FreedReport) -> None:
        # All departed layers use the same block ids, so memory above the highest id that a
        # departing sequence uses can be unmapped.
        self._releases.append(freed)
        needed = self._context.highest_block(self._departing) + 1
        self._context.commands.append(ReleaseDeparted(needed))

    def _report_freed(self, freed: _FreedReport, grown: bool) -> None:
        context = self._context
        capacity = context.capacity
        if freed.peer is not None:
            context.send(freed.peer, KvFreed(freed.seq_id, capacity))
        if context.leads:
            return
        # `KvFreed` went to the sequence's leader; this group's leader needs the capacity as well.
        freed_for_other = freed.peer is not None and freed.peer != context.leader
        if freed_for_other or (freed.peer is None and grown):
            context.send(context.leader, Capacity(capacity))
        if freed.blocks:
            # This group's leader counts the blocks as used since `Joined`, but for no sequence: it
            # does not lead the sequence, even if it sent the `FreeKv`.
            context.send(context.leader, ForeignBlocksFreed(freed.blocks))
