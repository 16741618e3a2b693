"""Orders to move running requests, and the choice of the requests that move."""

from bisect import bisect
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from math import inf

from services.core.destination import Destination
from services.core.planner.sequence import Sequence
from services.core.shipments.vocabulary import ShippingPort

MOVE_INTERVAL_S = 2.0
"""Seconds for which a request that has run at another worker stays here, so that it progresses."""


@dataclass(slots=True)
class MoveOrder:
    """Requests that move to the worker at `target`."""

    name: str
    target: Destination
    left: float = 0  # requests that may still be chosen
    if_cheaper: bool = False  # only requests whose KV is sent faster than it is computed
    blocks_left: float = inf  # KV blocks that may still be freed here
    # Ids of the sequences that may still be chosen. Sequences that arrive after the start of the
    # order are exempt: otherwise it would not end while requests keep arriving.
    untried: set[str] = field(default_factory=set)
    moved: int = 0
    kept: int = 0
    reason: str = ""  # why the last of the kept requests stays


@dataclass(slots=True)
class MoveChooser:
    """Chooses the requests of orders; `shipped` are sequences that are being shipped."""

    port: ShippingPort
    layer_blocks_per_s: float  # least bandwidth, in blocks of a layer
    num_layers: int

    def next(self, order: MoveOrder, shipped: Container[str], now_s: float) -> Sequence | None:
        """The next sequence to move for an order; None if no further sequence may move."""
        candidates = self.candidates(order, shipped, now_s)
        if order.blocks_left == inf:
            return next(candidates, None)
        # With a limit of blocks, move few large requests rather than many small requests. KV of
        # batch requests that yield is exempt: online requests get it without a move.
        yields = self.port.planner.sequence_table.precedence.batch_yields
        sized = [(self.own_blocks(seq), seq) for seq in candidates if seq.online or not yields]
        fitting = [entry for entry in sized if entry[0] <= order.blocks_left]
        if not fitting:
            return None
        return min(fitting, key=lambda entry: (entry[1].online, -entry[0]))[1]

    def own_blocks(self, sequence: Sequence) -> int:
        """Number of KV blocks that the end of a sequence frees: those after its shared prefix."""
        table = self.port.planner.table
        ids, users = table.block_ids(sequence.seq_id), table.pool.users
        return len(ids) - bisect(ids, False, key=lambda block: users[block] == 1)

    def candidates(
        self, order: MoveOrder, shipped: Container[str], now_s: float
    ) -> Iterator[Sequence]:
        """Sequences that may move: batch sequences first, the newest of each class first."""
        for online in (False, True):
            for sequence in reversed(self.port.planner.running):
                if (
                    sequence.online is online
                    and sequence.seq_id not in shipped
                    and sequence.seq_id in order.untried
                    and may_move(sequence, now_s)
                    and (self._is_cheaper(sequence) or not order.if_cheaper)
                ):
                    yield sequence

    def sending_s(self, blocks: int) -> float:
        """Seconds to send blocks at the least bandwidth of a link."""
        return blocks * self.num_layers / self.layer_blocks_per_s

    def _is_cheaper(self, sequence: Sequence) -> bool:
        """Whether sending the KV of a sequence takes less time than computing it."""
        costs = self.port.planner.config.cost_model
        if costs is None or not sequence.registered:
            return sequence.registered > 0
        return self.sending_s(sequence.registered) < costs.chunk_s(0, sequence.computed)


def decodes(sequence: Sequence) -> bool:
    """Whether the next iteration of a running sequence computes an output token after the first."""
    return sequence.output_count > 0 and sequence.remaining == 1


def may_move(sequence: Sequence, now_s: float) -> bool:
    """Whether a running sequence decodes, its gateway resumes it, and it has not just moved here.

    A sequence without output does not move: another worker can start it again at little loss.
    """
    request = sequence.request
    if not (decodes(sequence) and request.resumable):
        return False
    return not request.output_ids or now_s - sequence.arrival_s >= MOVE_INTERVAL_S
