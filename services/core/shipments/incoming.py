"""Shipments to this worker: blocks for the KV, and the starts of requests; see `vocabulary.py`.

    LANDING → WHOLE → over

A pin holds the blocks of a shipment until its request starts, or until a time limit passes. The
request starts once its KV is whole. If it waits for too long, it starts with the parts that have
landed before the first gap, and the rest runs again.
"""

from dataclasses import dataclass, field

from services.core.planner.pin_events import BlocksAllocated, BlocksFilled, PinReleased
from services.core.planner.pins import Pin
from services.core.prefix.block_hash import block_hashes, prompt_root
from services.core.shipments.vocabulary import (
    ShipmentEnded,
    ShipmentOffered,
    ShipmentOpened,
    ShipmentRefused,
    ShipmentSealed,
    ShippingPort,
    incoming_pin,
    part_of,
)

LANDINGS_MAX = 64
"""Maximum number of shipments that arrive at the same time."""
LANDING_S = 15.0
"""Time limit until the next part of a shipment lands or the shipment is sealed, in seconds."""
CLAIM_S = 10.0
"""Seconds for which whole KV is kept for a request that has not arrived or cannot start."""
WAIT_S = 1.0
"""Seconds for which a request that has arrived waits for its KV."""


@dataclass(slots=True)
class _Landing:
    """A shipment on its way here; counts are of blocks from the start of the request."""

    shipment_id: str
    peer: str
    hashes: list[bytes]  # of the blocks whose tokens are known
    cache_salt: str
    room: int  # blocks of the pin
    have: int  # blocks that were cached here
    until_s: float
    sealed: bool = False  # `hashes` are those of all shipped blocks
    filled: bool = False
    claimed: bool = False  # the request has arrived
    progressed: bool = False  # a part has landed since the last `advance`
    landed: dict[int, int] = field(default_factory=dict)  # first block → end of a part

    @property
    def pin(self) -> str:
        return incoming_pin(self.shipment_id)

    @property
    def whole(self) -> int:
        """Number of first blocks whose KV is here without a gap."""
        end = self.have
        while end in self.landed:
            end = self.landed[end]
        return min(end, len(self.hashes))


@dataclass(slots=True)
class Incoming:
    """The shipments to this worker."""

    port: ShippingPort
    kv_layout: str
    received_total: int = 0  # requests that started here with shipped KV
    _landings: dict[str, _Landing] = field(default_factory=dict)  # by shipment id

    @property
    def active(self) -> bool:
        """Whether `advance` has work to do, now or later."""
        return bool(self._landings)

    def blocks_for(self, transfer_id: str, pin: str, first: int, blocks: int) -> tuple[int, ...]:
        """Ids of the blocks for KV of a part; () if the part is not expected.

        `first` is the index of the first block in the request.
        """
        part = part_of(transfer_id)
        landing = self._landings.get(part[0]) if part is not None else None
        if part is None or landing is None or landing.pin != pin or landing.filled:
            return ()
        # Never write to blocks that other requests share.
        start, end = max(part[1], landing.have), min(part[1] + part[2], landing.room)
        if not start <= first < first + blocks <= end:
            return ()
        return self.port.planner.table.block_ids(pin)[first : first + blocks]

    # --- events

    def note_offered(self, peer: str, frame: ShipmentOffered, now_s: float, obstacle: str) -> None:
        """Pin blocks, or refuse the offer; `obstacle`: why this worker takes no requests now."""
        reason = obstacle or self._obstacle(frame)
        hashes = () if reason else self._hashes(frame.cache_salt, b"", frame.token_ids)
        cached = len(list(self.port.planner.pool.cache.find(hashes)))
        if not reason and not self._has_room(frame):
            reason = "it lacks free KV blocks"
        if reason:
            self.port.send(peer, ShipmentRefused(frame.shipment_id, reason))
            return
        landing = _Landing(
            frame.shipment_id,
            peer,
            list(hashes),
            frame.cache_salt,
            frame.blocks,
            cached,
            now_s + LANDING_S,
        )
        self._landings[frame.shipment_id] = landing
        self.port.apply(
            BlocksAllocated(landing.pin, frame.request_id, frame.online, hashes, frame.blocks)
        )
        self.port.send(peer, ShipmentOpened(frame.shipment_id, cached))

    def note_sealed(self, peer: str, frame: ShipmentSealed, now_s: float) -> None:
        """The request has ended at the source, and no further parts are sent."""
        landing = self._landing(peer, frame.shipment_id)
        if landing is None or landing.sealed:
            return
        parent = landing.hashes[-1] if landing.hashes else b""
        landing.hashes += self._hashes(landing.cache_salt, parent, frame.token_ids)
        del landing.hashes[landing.room :]
        landing.sealed = True
        if not landing.claimed:  # else the time limit of the waiting request applies
            landing.until_s = now_s + CLAIM_S
        self._fill_if_whole(landing)

    def note_part(self, shipment_id: str, first: int, blocks: int, intact: bool) -> None:
        """The transfer of a part has ended."""
        landing = self._landings.get(shipment_id)
        if landing is not None and intact:
            landing.landed[first] = first + blocks
            landing.progressed = True
            self._fill_if_whole(landing)

    def note_ended(self, peer: str, frame: ShipmentEnded) -> None:
        """The source has ended a shipment: the request stays there, or has ended."""
        landing = self._landing(peer, frame.shipment_id)
        if landing is not None:
            self._release(landing)

    def note_lost(self, worker_id: str) -> None:
        """The connection to a worker was lost: nothing more arrives from it."""
        for landing in [entry for entry in self._landings.values() if entry.peer == worker_id]:
            if not landing.claimed and not landing.sealed:
                self._release(landing)
            elif not landing.filled:
                self._fill(landing)

    def end_all(self) -> None:
        """Release all blocks."""
        for landing in list(self._landings.values()):
            self._release(landing)

    def advance(self, now_s: float) -> None:
        """Note which requests have arrived or started, and end overdue shipments."""
        for landing in list(self._landings.values()):
            pin = self.port.planner.sequence_table.pins.get(landing.pin)
            if pin is None:  # the request has started or ended, or its blocks were needed
                self.received_total += landing.claimed and landing.filled
                del self._landings[landing.shipment_id]
            else:
                self._advance(landing, pin, now_s)

    def _advance(self, landing: _Landing, pin: Pin, now_s: float) -> None:
        if pin.seq_id and not landing.claimed:
            landing.claimed = True
            landing.until_s = now_s + (CLAIM_S if landing.filled else WAIT_S)
        if landing.progressed and not landing.sealed:
            landing.until_s = now_s + LANDING_S
        landing.progressed = False
        if now_s <= landing.until_s:
            return
        if landing.claimed and not landing.filled:
            self._fill(landing)  # with the parts that are here
            landing.until_s = now_s + CLAIM_S
        else:
            # The blocks stay cached: a request that comes later has hits unless they are evicted.
            self._release(landing)

    # --- helpers

    def _obstacle(self, frame: ShipmentOffered) -> str:
        """Why an offer cannot be taken, apart from room; "" if it can."""
        planner = self.port.planner
        config = planner.config
        if frame.kv_layout != self.kv_layout or not config.prefix_caching:
            return "it runs another model, or without prefix_caching"
        if frame.shipment_id in self._landings:
            return f"shipment {frame.shipment_id} is on its way already"
        if len(self._landings) >= LANDINGS_MAX:
            return f"{LANDINGS_MAX} requests are on their way to it"
        fits = frame.tokens_max <= config.num_blocks * config.block_size
        if not fits or not len(frame.token_ids) <= frame.blocks * config.block_size > 0:
            return "the request is too long for it"
        free, size = self._free(frame), config.block_size
        waiting = [seq for seq in planner.waiting if seq.online and not seq.pin]
        if any(seq.blocks_to_admit(size) > free for seq in waiting):
            return "requests wait there for KV blocks"
        expected = planner.sequence_table.running_count + len(self._landings)
        return "it runs as many requests as it may" if expected >= config.max_running else ""

    def _has_room(self, frame: ShipmentOffered) -> bool:
        """Whether enough blocks are free, with a spare block for each running sequence."""
        spare = self.port.planner.sequence_table.running_count + 1
        return self._free(frame) >= frame.blocks + spare

    def _free(self, frame: ShipmentOffered) -> int:
        """Blocks that a request can get: batch requests yield theirs to online requests."""
        table = self.port.planner.sequence_table
        return table.blocks_for_online if frame.online else table.ledger.free

    def _hashes(
        self, cache_salt: str, parent: bytes, token_ids: tuple[int, ...]
    ) -> tuple[bytes, ...]:
        size = self.port.planner.config.block_size
        return tuple(block_hashes(parent or prompt_root(cache_salt), token_ids, size))

    def _landing(self, peer: str, shipment_id: str) -> _Landing | None:
        landing = self._landings.get(shipment_id)
        return landing if landing is not None and landing.peer == peer else None

    def _fill_if_whole(self, landing: _Landing) -> None:
        if landing.sealed and landing.whole == len(landing.hashes):
            self._fill(landing)

    def _fill(self, landing: _Landing) -> None:
        """Put the KV that is here into the prefix cache; the request may start."""
        pins = self.port.planner.sequence_table.pins
        if landing.filled or pins.get(landing.pin) is None:
            return
        landing.filled = True
        self.port.apply(BlocksFilled(landing.pin, tuple(landing.hashes[: landing.whole])))

    def _release(self, landing: _Landing) -> None:
        del self._landings[landing.shipment_id]
        self.port.apply(PinReleased(landing.pin))
