"""The frames of the activation lane: those of `services.core`, and two that request slabs.

A slab is the memory with the parameters of a layer, or of the embeddings.
"""

from dataclasses import dataclass
from typing import Any

from services.core.changeover import frames as core
from services.core.shipments import vocabulary as shipments


@dataclass(frozen=True, slots=True)
class SlabRequest:
    """A request to send the parameters of `slab` on the bulk lane, if their digest is `digest`."""

    slab: str
    transfer_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class SlabRefused:
    """The refusal of a `SlabRequest`: the member lacks these parameters or is too busy."""

    slab: str
    transfer_id: str


LaneFrame = core.MemberFrame | shipments.ShipmentFrame | SlabRequest | SlabRefused
KINDS: dict[int, type[Any]] = {
    0x200: core.Activations,
    0x201: core.Samples,
    0x202: core.Drained,
    0x203: core.Joined,
    0x204: core.Capacity,
    0x205: core.CapacityKept,
    0x206: core.ForeignBlocksFreed,
    0x207: core.Adopt,
    0x208: core.Adopted,
    0x209: core.AllAdopted,
    0x20A: core.Reserve,
    0x20B: core.Reserved,
    0x20C: core.SendKv,
    0x20D: core.KvEnded,
    0x20E: core.FreeKv,
    0x20F: core.KvFreed,
    0x210: SlabRequest,
    0x211: SlabRefused,
    0x212: core.RequestDropped,
    0x213: core.EpochAbandoned,
    0x214: core.AllMoved,
    0x215: core.MemberRemoved,
    0x216: shipments.ShipmentOffered,
    0x217: shipments.ShipmentOpened,
    0x218: shipments.ShipmentRefused,
    0x219: shipments.ShipmentSealed,
    0x21A: shipments.ShipmentEnded,
}
"""Frame types by their number on the wire."""
