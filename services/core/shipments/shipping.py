"""The shipments of a worker, in both directions; see `vocabulary.py`."""

from dataclasses import dataclass, field
from typing import Any

from services.core.destination import Destination
from services.core.planner.sequence import Sequence
from services.core.report import ShipmentCounts
from services.core.shipments.incoming import Incoming
from services.core.shipments.outgoing import Outgoing
from services.core.shipments.vocabulary import (
    Emit,
    ShipmentEnded,
    ShipmentOffered,
    ShipmentOpened,
    ShipmentRefused,
    ShipmentSealed,
    ShippingAsked,
    ShippingPort,
    part_of,
)


@dataclass(slots=True)
class Shipping:
    """Passes frames and events to the shipments of this worker.

    `source` is a unique name of this engine process. Workers ship KV only to workers with the same
    `kv_layout`; a worker with the layout "" ships none.
    """

    port: ShippingPort
    emit: Emit
    source: str
    kv_layout: str
    layer_blocks_per_s: float  # least bandwidth of a link, in KV blocks of a layer
    num_layers: int
    outgoing: Outgoing = field(init=False)
    incoming: Incoming = field(init=False)

    def __post_init__(self) -> None:
        self.outgoing = Outgoing(
            *(self.port, self.emit, self.source, self.kv_layout),
            *(self.layer_blocks_per_s, self.num_layers),
        )
        self.incoming = Incoming(self.port, self.kv_layout)

    @property
    def active(self) -> bool:
        """Whether `advance` has work to do, now or later."""
        return self.outgoing.active or self.incoming.active

    @property
    def counts(self) -> ShipmentCounts:
        """Totals since the start."""
        outgoing = self.outgoing
        return ShipmentCounts(
            outgoing.shipped_total,
            self.incoming.received_total,
            outgoing.kept_total,
            outgoing.shipped_blocks_total,
            outgoing.handed_over_total,
            outgoing.hand_overs_kept_total,
        )

    def ask(self, event: ShippingAsked, obstacle: str) -> None:
        """Move requests to another worker; `obstacle`: why none can move now."""
        self.outgoing.begin(event, obstacle or self._no_layout)

    def hand_over(self, sequence: Sequence, target: Destination) -> None:
        """Hand a sequence that has just arrived over to `target` after its first output token."""
        if self.kv_layout:
            self.outgoing.hand_over(sequence, target)

    def advance(self, now_s: float, obstacle: str) -> None:
        """Continue all shipments; call it between iterations while `active`.

        `obstacle`: why no request can be handed over now.
        """
        self.incoming.advance(now_s)
        self.outgoing.advance(now_s, obstacle)

    def receive(self, peer: str, frame: Any, now_s: float, obstacle: str) -> None:
        """Handle a frame of another worker; `obstacle`: why this worker takes no requests now."""
        match frame:
            case ShipmentOffered():
                self.incoming.note_offered(peer, frame, now_s, obstacle or self._no_layout)
            case ShipmentOpened():
                self.outgoing.note_opened(peer, frame, now_s)
            case ShipmentRefused():
                reason = f"{peer} takes no request: {frame.reason}"
                self.outgoing.note_refused(peer, frame.shipment_id, reason)
            case ShipmentSealed():
                self.incoming.note_sealed(peer, frame, now_s)
            case ShipmentEnded():
                self.incoming.note_ended(peer, frame)

    def note_transfer(self, transfer_id: str, intact: bool) -> bool:
        """Note the end of a transfer; False if it belongs to no shipment."""
        part = part_of(transfer_id)
        if part is None:
            return False
        shipment_id, first, blocks = part
        self.outgoing.note_part(shipment_id, transfer_id, intact)
        self.incoming.note_part(shipment_id, first, blocks, intact)
        return True

    def note_lost(self, worker_id: str) -> None:
        """The connection to a worker was lost."""
        self.outgoing.note_lost(worker_id)
        self.incoming.note_lost(worker_id)

    def end_all(self, reason: str) -> None:
        """End all shipments, because this worker's group changes."""
        self.outgoing.end_all(reason)
        self.incoming.end_all()

    @property
    def _no_layout(self) -> str:
        return "" if self.kv_layout else "its engine ships no KV"
