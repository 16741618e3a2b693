"""Shipments from this worker: which requests move, and when; see `vocabulary.py`.

    OFFERED → OPEN → SEALED → over

A shipment ends early if the target refuses or is lost, the request ends or is preempted, a part
fails, or a time limit passes. Before SEALED, the request then runs on here. Afterwards the request
is at its gateway, and only parts that are still on their way are lost. A shipment belongs to an
order (`orders.py`), or hands a request over after its prompt (`hand_overs.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from services.core.destination import Destination
from services.core.planner.pin_events import BlocksShared, PinReleased, SequenceShipped
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_ids import request_id_of
from services.core.shipments.hand_overs import TAIL_S, HandOvers
from services.core.shipments.orders import MoveChooser, MoveOrder, decodes
from services.core.shipments.vocabulary import (
    CancelShipping,
    Emit,
    ShipBlocks,
    ShipmentEnded,
    ShipmentOffered,
    ShipmentOpened,
    ShipmentSealed,
    ShippingAsked,
    ShippingOver,
    ShippingPort,
    incoming_pin,
    outgoing_pin,
    transfer_id_of,
)

AT_ONCE = 4
"""Maximum number of shipments of an order that are under way at the same time."""
GROWTH_BLOCKS = 16
"""Blocks that a request may fill while it is shipped; tokens beyond run again at the target."""
PART_BLOCKS = 32
"""Maximum number of blocks of a part."""
PART_MIN_BLOCKS = 4
"""Least new blocks of a running request for a further part while other parts are under way."""
STOP_BLOCKS = 2
"""Maximum number of blocks that are not sent yet when the request stops here."""
ANSWER_S = 5.0
"""Time limit of the answer to an offer, in seconds; targets answer between their iterations."""
UNANSWERED_MAX = 16
"""Number of unanswered offers from which a worker gets no further hand-overs: it may hang."""
SHIP_S = 5.0
"""Time limit of an open shipment, in seconds: the request may grow faster than the link sends."""
SEALED_S = 10.0
"""Time limit of the parts that are under way when the request stops here, in seconds."""
ORDERS_MAX = 16
"""Maximum number of orders at a time."""


class _Step(Enum):
    OFFERED = auto()
    OPEN = auto()
    SEALED = auto()


@dataclass(slots=True)
class _Shipment:
    """A shipment; counts are of blocks from the start of the request."""

    shipment_id: str
    seq_id: str
    order: MoveOrder
    until_s: float  # time limit of the step
    offered: int  # blocks whose tokens were offered to the target
    room: int  # blocks that the target has pinned
    step: _Step = _Step.OFFERED
    sent: int = 0  # blocks in parts so far, including those that the target had cached
    parts: dict[str, int] = field(default_factory=dict)  # transfer id → blocks, of those under way
    hand_over: bool = False  # it began with the prompt

    @property
    def peer(self) -> str:
        return self.order.target.worker_id

    @property
    def pin(self) -> str:
        return outgoing_pin(self.shipment_id)


@dataclass(slots=True)
class Outgoing:
    """The shipments from this worker. `source` is a unique name of this engine process."""

    port: ShippingPort
    emit: Emit
    source: str
    kv_layout: str
    layer_blocks_per_s: float  # least bandwidth, in blocks of a layer
    num_layers: int
    shipped_total: int = 0  # requests that moved away with KV by orders
    shipped_blocks_total: int = 0  # blocks sent for orders and hand-overs
    kept_total: int = 0  # shipments of orders that failed before the request had moved
    handed_over_total: int = 0  # requests that were handed over
    hand_overs_kept_total: int = 0  # requests that decode here because their hand-over failed
    _shipments: dict[str, _Shipment] = field(default_factory=dict)
    _orders: dict[str, MoveOrder] = field(default_factory=dict)
    _hand_overs: HandOvers = field(init=False)
    _chooser: MoveChooser = field(init=False)
    _made: int = 0

    def __post_init__(self) -> None:
        self._hand_overs = HandOvers(self.port)
        self._chooser = MoveChooser(self.port, self.layer_blocks_per_s, self.num_layers)

    @property
    def active(self) -> bool:
        """Whether `advance` has work to do, now or later."""
        return bool(self._orders or self._shipments or self._hand_overs)

    # --- events

    def begin(self, event: ShippingAsked, obstacle: str) -> None:
        """Begin an order, unless it has begun. `obstacle`: why nothing can move now."""
        if event.order in self._orders:
            return
        if len(self._orders) >= ORDERS_MAX:
            obstacle = obstacle or f"{ORDERS_MAX} orders to move requests are under way"
        if not self.port.planner.config.prefix_caching:
            obstacle = obstacle or "requests move with their KV only with prefix_caching: true"
        if obstacle:
            self.emit(ShippingOver(event.order, 0, 0, obstacle))
            return
        order = MoveOrder(
            *(event.order, event.target, event.requests_max or inf, event.if_cheaper),
            event.blocks_max or inf,
            set(self.port.planner.sequences),
        )
        self._orders[event.order] = order
        self.advance(event.now_s, "")

    def hand_over(self, sequence: Sequence, target: Destination) -> None:
        """Hand a sequence that has just arrived over to `target` after its first output token."""
        self._hand_overs.expect(sequence, target)

    def advance(self, now_s: float, obstacle: str) -> None:
        """Continue all shipments, and choose further requests; call it between iterations.

        `obstacle`: why no request can be handed over now.
        """
        for shipment in list(self._shipments.values()):
            self._advance(shipment, now_s)
        for order in list(self._orders.values()):
            self._choose(order, now_s)
        if self._hand_overs:
            self._begin_hand_overs(now_s, obstacle)

    def note_opened(self, peer: str, frame: ShipmentOpened, now_s: float) -> None:
        """The target has pinned blocks: send the first parts."""
        shipment = self._shipment(peer, frame.shipment_id)
        if shipment is not None and shipment.step is _Step.OFFERED:
            shipment.step, shipment.until_s = _Step.OPEN, now_s + SHIP_S
            shipment.sent = frame.have
            self._advance(shipment, now_s)

    def note_refused(self, peer: str, shipment_id: str, reason: str) -> None:
        """The target cannot take a request: choose no further requests for this order."""
        shipment = self._shipment(peer, shipment_id)
        if shipment is not None and shipment.step is _Step.OFFERED:
            shipment.order.left = 0
            self._keep(shipment, reason, notify=False)

    def note_part(self, shipment_id: str, transfer_id: str, intact: bool) -> None:
        """The transfer of a part has ended."""
        shipment = self._shipments.get(shipment_id)
        if shipment is None or transfer_id not in shipment.parts:
            return
        del shipment.parts[transfer_id]
        if not intact and shipment.step is not _Step.SEALED:
            self._keep(shipment, "a transfer failed")

    def note_lost(self, worker_id: str) -> None:
        """The connection to a worker was lost, or does not exist."""
        self.hand_overs_kept_total += self._hand_overs.drop(worker_id)
        for order in list(self._orders.values()):
            if order.target.worker_id == worker_id:
                order.left = 0
        self._end_all(f"{worker_id} is lost", lambda shipment: shipment.peer == worker_id)

    def end_all(self, reason: str) -> None:
        """End all shipments and orders."""
        self.hand_overs_kept_total += self._hand_overs.drop()
        for order in self._orders.values():
            order.left = 0
        self._end_all(reason, lambda _shipment: True)
        for order in list(self._orders.values()):
            self._end_if_over(order, reason)

    # --- steps of a shipment

    def _advance(self, shipment: _Shipment, now_s: float) -> None:
        if shipment.step is _Step.SEALED:
            if not shipment.parts or now_s > shipment.until_s:
                self._drop(shipment)
            return
        planner = self.port.planner
        sequence = planner.sequences.get(shipment.seq_id)
        if sequence is None:
            self._keep(shipment, "the request has ended")
        elif self._lost_kv(shipment, sequence):
            self._keep(shipment, "the request was preempted")
        elif now_s > shipment.until_s:
            offered = shipment.step is _Step.OFFERED
            late = "did not answer" if offered else "got no parts in time"
            self._keep(shipment, f"{shipment.peer} {late}")
        elif shipment.step is _Step.OPEN:
            if not sequence.output_count:
                # The time limit does not include the prompt, whose chunks may take long.
                shipment.until_s = now_s + SHIP_S
            self._send_parts(shipment, sequence)
            # A suspended sequence is not in `running`: its iteration has not ended.
            if sequence in planner.running and self._may_seal(shipment, sequence):
                self._seal(shipment, sequence, now_s)

    def _lost_kv(self, shipment: _Shipment, sequence: Sequence) -> bool:
        table, pin = self.port.planner.table, shipment.pin
        if sequence.phase is not Phase.RUNNING:
            return sequence.begun  # a sequence that has not begun has no KV to lose
        pinned = table.block_ids(pin)
        # The sequence may have been preempted and started again, or the pin released for lack of
        # blocks.
        if shipment.parts and not pinned:
            return True
        return pinned != table.block_ids(sequence.seq_id)[: len(pinned)]

    def _shippable(self, shipment: _Shipment, sequence: Sequence) -> int:
        """Number of first blocks of the sequence that can be sent before it ends here."""
        return min(sequence.registered, shipment.room)

    def _may_seal(self, shipment: _Shipment, sequence: Sequence) -> bool:
        """Whether a running sequence may end here now, because the target has most of its KV."""
        if not decodes(sequence):
            return False
        ready = self._shippable(shipment, sequence)
        missing = ready - shipment.sent
        if not shipment.hand_over:
            return not shipment.parts and missing <= STOP_BLOCKS
        # The KV of earlier chunks is normally sent by now. On a slow link the request decodes here
        # until little is left.
        tail_s = self._chooser.sending_s(missing + sum(shipment.parts.values()))
        return ready >= shipment.offered and tail_s <= TAIL_S

    def _send_parts(self, shipment: _Shipment, sequence: Sequence) -> None:
        ready = self._shippable(shipment, sequence)
        if ready - shipment.sent < (PART_MIN_BLOCKS if shipment.parts else STOP_BLOCKS + 1):
            return
        self.port.apply(BlocksShared(shipment.pin, shipment.seq_id))
        self._send_until(shipment, ready)

    def _send_until(self, shipment: _Shipment, end: int) -> None:
        """Send all blocks before `end` that were not sent, in parts."""
        while (blocks := min(end - shipment.sent, PART_BLOCKS)) > 0:
            transfer_id = transfer_id_of(shipment.shipment_id, shipment.sent, blocks)
            shipment.parts[transfer_id] = blocks
            self.emit(
                ShipBlocks(
                    transfer_id,
                    shipment.peer,
                    shipment.pin,
                    incoming_pin(shipment.shipment_id),
                    shipment.sent,
                    blocks,
                )
            )
            shipment.sent += blocks
            self.shipped_blocks_total += blocks

    def _seal(self, shipment: _Shipment, sequence: Sequence, now_s: float) -> None:
        """Send the rest and end the sequence here; only this step moves the request."""
        end = self._shippable(shipment, sequence)
        size = self.port.planner.config.block_size
        token_ids = tuple(sequence.token_ids[shipment.offered * size : end * size])
        self.port.apply(SequenceShipped(shipment.pin, shipment.seq_id, shipment.order.target))
        self._send_until(shipment, end)
        self.port.send(shipment.peer, ShipmentSealed(shipment.shipment_id, token_ids))
        shipment.step, shipment.until_s = _Step.SEALED, now_s + SEALED_S
        shipment.order.moved += 1
        if shipment.hand_over:
            self.handed_over_total += 1
        else:
            self.shipped_total += 1

    def _keep(self, shipment: _Shipment, reason: str, notify: bool = True) -> None:
        """End a shipment whose request stays here."""
        if notify:
            self.port.send(shipment.peer, ShipmentEnded(shipment.shipment_id, reason))
        shipment.order.kept += 1
        shipment.order.reason = reason
        if not shipment.hand_over:
            self.kept_total += 1
        elif shipment.seq_id in self.port.planner.sequences:
            self.hand_overs_kept_total += 1
        self._drop(shipment)

    def _drop(self, shipment: _Shipment) -> None:
        del self._shipments[shipment.shipment_id]
        for transfer_id in sorted(shipment.parts):
            self.emit(CancelShipping(transfer_id))
        self.port.apply(PinReleased(shipment.pin))

    def _end_all(self, reason: str, which: Callable[[_Shipment], bool]) -> None:
        for shipment in [entry for entry in self._shipments.values() if which(entry)]:
            if shipment.step is _Step.SEALED:
                self._drop(shipment)
            else:
                self._keep(shipment, reason)

    def _shipment(self, peer: str, shipment_id: str) -> _Shipment | None:
        shipment = self._shipments.get(shipment_id)
        return shipment if shipment is not None and shipment.peer == peer else None

    # --- orders

    def _choose(self, order: MoveOrder, now_s: float) -> None:
        """Offer further requests of an order, and end the order if none is under way."""
        under_way = sum(
            shipment.order is order and shipment.step is not _Step.SEALED
            for shipment in self._shipments.values()
        )
        while under_way < AT_ONCE and order.left > 0:
            sequence = self._chooser.next(order, self._shipped, now_s)
            if sequence is None:
                break
            order.left -= 1
            order.blocks_left -= self._chooser.own_blocks(sequence)
            order.untried.discard(sequence.seq_id)
            self._offer(order, sequence, sequence.registered, now_s)
            under_way += 1
        if not under_way:
            self._end_if_over(order, "no further request can move now")

    @property
    def _shipped(self) -> set[str]:
        return {shipment.seq_id for shipment in self._shipments.values()}

    def _begin_hand_overs(self, now_s: float, obstacle: str) -> None:
        """Offer the requests that start next to the workers that compute their output."""
        if obstacle:
            self.hand_overs_kept_total += self._hand_overs.drop()
            return
        size = self.port.planner.config.block_size
        for sequence, target in self._hand_overs.take_due():
            unanswered = sum(
                shipment.step is _Step.OFFERED and shipment.peer == target.worker_id
                for shipment in self._shipments.values()
            )
            if unanswered < UNANSWERED_MAX:
                order = MoveOrder("", target)
                self._offer(order, sequence, sequence.prompt_tokens // size, now_s, hand_over=True)
            else:
                self.hand_overs_kept_total += 1

    def held_back(self, now_s: float) -> frozenset[str]:
        """Sequences that are being shipped or that orders may still choose."""
        ids = self._shipped
        for order in self._orders.values():
            if order.left > 0:
                candidates = self._chooser.candidates(order, self._shipped, now_s)
                ids.update(sequence.seq_id for sequence in candidates)
        return frozenset(ids)

    def _offer(
        self,
        order: MoveOrder,
        sequence: Sequence,
        blocks: int,
        now_s: float,
        hand_over: bool = False,
    ) -> None:
        """Offer the first `blocks` blocks of a sequence, and the blocks that it fills meanwhile."""
        self._made += 1
        size = self.port.planner.config.block_size
        shipment_id = f"{self.source}.{self._made}"
        room = min(blocks + GROWTH_BLOCKS, -(-sequence.tokens_max // size))
        self._shipments[shipment_id] = _Shipment(
            *(shipment_id, sequence.seq_id, order, now_s + ANSWER_S, blocks, room),
            hand_over=hand_over,
        )
        self.port.send(
            order.target.worker_id,
            ShipmentOffered(
                shipment_id,
                self.kv_layout,
                request_id_of(sequence.seq_id),
                tuple(sequence.token_ids[: blocks * size]),
                room,
                sequence.tokens_max,
                sequence.request.cache_salt,
                sequence.online,
            ),
        )

    def _end_if_over(self, order: MoveOrder, reason: str) -> None:
        """Report the end of an order, if it has not ended; its sealed shipments continue."""
        if self._orders.pop(order.name, None) is not None:
            self.emit(ShippingOver(order.name, order.moved, order.kept, order.reason or reason))
