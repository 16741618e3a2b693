"""Frames, events and commands of shipments: KV of running requests that moves to another worker.

A *shipment* is the KV of the first blocks of a request on its way from the *source*, which runs the
request, to the *target*, another worker with the same model and code. Both are single workers.
*Parts* of the KV are sent while the request runs on. Then the source *seals* the shipment: it ends
the request and returns it to its gateway, which starts it at the target. There the KV is in the
prefix cache, so at most a block and a token run again. After a failure, the request runs on at the
source, or is recomputed where it resumes.

The source offers the tokens of the request; the target computes the block hashes itself, and
answers with the number of blocks that it has cached. Shipment ids contain the source's incarnation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.core.destination import Destination
from services.core.planner.events import Event as PlannerEvent
from services.core.planner.state import PlannerState

# --- frames


@dataclass(frozen=True, slots=True)
class ShipmentOffered:
    """To the target: the source offers the KV of `token_ids` (whole blocks) and of later tokens.

    `blocks`: blocks that the target must pin for both. `kv_layout` identifies model, code and
    format of the KV. `tokens_max`: longest length of the request, prompt and output.
    """

    shipment_id: str
    kv_layout: str
    request_id: str
    token_ids: tuple[int, ...]
    blocks: int
    tokens_max: int
    cache_salt: str
    online: bool


@dataclass(frozen=True, slots=True)
class ShipmentOpened:
    """To the source: there is room; the first `have` blocks are cached and need not be sent."""

    shipment_id: str
    have: int


@dataclass(frozen=True, slots=True)
class ShipmentRefused:
    """To the source: the target cannot take the KV."""

    shipment_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ShipmentSealed:
    """To the target: no further parts follow, and the request returns to its gateway.

    `token_ids` follow the offered ones, up to the end of the last shipped block.
    """

    shipment_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShipmentEnded:
    """To the target: the request stays at the source, or has ended."""

    shipment_id: str
    reason: str


ShipmentFrame = ShipmentOffered | ShipmentOpened | ShipmentRefused | ShipmentSealed | ShipmentEnded

# --- events


@dataclass(frozen=True, slots=True)
class ShippingAsked:
    """Move running requests to the worker at `target`: an *order*.

    Answered by `ShippingOver` with the same `order`. Only requests that are at the source now move,
    at most `requests_max` (0: no limit). `if_cheaper`: only requests whose KV is sent in less time
    than it is computed. `blocks_max`: the requests free at most this many KV blocks, and batch
    requests that yield their KV do not move (0: no limit, all may move).
    """

    now_s: float
    order: str
    target: Destination
    requests_max: int
    if_cheaper: bool = False
    blocks_max: int = 0


@dataclass(frozen=True, slots=True)
class ShippingPeerLost:
    """The connection to a worker was lost, or is missing for a hand-over."""

    worker_id: str


# --- commands


@dataclass(frozen=True, slots=True)
class ShipBlocks:
    """Send the KV of `blocks` blocks from `first` on of a pin; ends with a `TransferOutcome`.

    `remote_pin` is the name of the pin at the target.
    """

    transfer_id: str
    peer: str
    pin: str
    remote_pin: str
    first: int
    blocks: int


@dataclass(frozen=True, slots=True)
class CancelShipping:
    """Cancel a transfer of `ShipBlocks`; ends with a `TransferOutcome`."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ShippingOver:
    """The end of an order: `moved` requests have moved, `kept` requests stay.

    `reason`: why the last of the kept requests stays, or why no further request moves.
    """

    order: str
    moved: int
    kept: int
    reason: str


ShippingCommand = ShipBlocks | CancelShipping | ShippingOver


class ShippingPort(Protocol):
    """The part of the worker's state machine that shipments use."""

    @property
    def planner(self) -> PlannerState:
        """The planner; read-only, see `apply`."""
        ...

    def send(self, peer: str, frame: Any) -> None:
        """Send a frame to another worker."""
        ...

    def apply(self, event: PlannerEvent) -> None:
        """Apply an event to the planner."""
        ...


Emit = Callable[[ShippingCommand], None]

# --- names

TRANSFERS = "ship/"
"""Prefix of the ids of transfers of shipments."""


def transfer_id_of(shipment_id: str, first: int, blocks: int) -> str:
    """Id of the transfer of a part: `blocks` blocks of the request from `first` on."""
    return f"{TRANSFERS}{shipment_id}/{first}/{blocks}"


def part_of(transfer_id: str) -> tuple[str, int, int] | None:
    """The shipment, first block and number of blocks of a transfer; None for other transfers."""
    if not transfer_id.startswith(TRANSFERS):
        return None
    parts = transfer_id.removeprefix(TRANSFERS).rsplit("/", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return parts[0], int(parts[1]), int(parts[2])


def outgoing_pin(shipment_id: str) -> str:
    """Name of the pin at the source."""
    return f"@ship-out.{shipment_id}"


def incoming_pin(shipment_id: str) -> str:
    """Name of the pin at the target."""
    return f"@ship-in.{shipment_id}"
