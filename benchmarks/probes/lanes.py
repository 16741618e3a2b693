"""How long activations take beside bulk transfers, between two processes of this machine.

`measure_in` runs in a process of its own (`python -m benchmarks.probes.lanes` prints its
result as JSON): the engines of a group do nothing else either.
"""

import argparse
import json
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from statistics import median
from time import sleep

import msgspec
import numpy as np

from benchmarks.probes.plain_stream import plain_stream
from benchmarks.probes.slab_walk import SlabWalk
from services.common.clock import monotonic_s
from services.common.lifecycle import die_with_parent
from services.core.changeover.epoch_fence import Standing
from services.worker.engine.transfer.errors import LaneClosed
from services.worker.engine.transfer.frame import Bytes, Frame, FrameCodec
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity, PeerLost
from services.worker.engine.transfer.mover import Mover, MoverConfig
from services.worker.engine.transfer.pieces import BULK_KINDS, BulkPiece, SlabCut, parameter_pieces
from services.worker.engine.transfer.receiver import Unpack
from services.worker.engine.transfer.transfer_event import TransferSent
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane

TRANSFER_BYTES = 16 << 20
WARM_UP_TRIPS = 50
TRIP_TIMEOUT_S = 30.0
ROUNDS = 10  # the kinds take turns, so that other work of the machine hits all of them
ALONE_S = 0.3
PLAIN_MESSAGES = 300
US = Identity("measuring", "1")
PEER = Identity("echoing", "1")


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """An activation frame that is sent back as it is."""

    trip: int


CODEC = FrameCodec({1: Ping, **BULK_KINDS})


@dataclass(frozen=True, slots=True)
class Trips:
    """Round trips of one kind; `bulk_bytes_per_s` is the bulk traffic beside them."""

    p50_s: float
    p99_s: float
    bulk_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LaneReport:
    """Round trips alone, and beside bulk that stands aside, and beside bulk that does not.

    `bulk_bytes_per_s` is bulk with nothing beside it, from slab to slab. `plain_bytes_per_s` is
    what UCX carries so without lanes, `plain_cached_bytes_per_s` what it carries from cache to
    cache; medians of turns that they took. `slab_bytes` is the size of the slabs.
    """

    payload_bytes: int
    chunk_bytes: int
    idle: Trips
    coordinated: Trips
    uncoordinated: Trips
    slab_bytes: int
    bulk_bytes_per_s: float
    plain_bytes_per_s: float
    plain_cached_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TripLoad:
    """`pause_s` passes between round trips, as a stage's execution would."""

    payload_bytes: int = 8192
    chunk_bytes: int = 1 << 20
    trips: int = 500
    pause_s: float = 0.002


@dataclass(slots=True)
class _Tally:
    """Measurements of one kind, over all rounds."""

    durations_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    bulk_bytes: int = 0

    def result(self) -> Trips:
        """Nearest ranks."""
        ordered = sorted(self.durations_s)
        p50, p99 = (ordered[(len(ordered) - 1) * share // 100] for share in (50, 99))
        return Trips(p50, p99, self.bulk_bytes / self.elapsed_s)


class _BulkStream:
    """Transfers of parts of a slab to the peer, until they are stopped."""

    def __init__(self, lane: UcxLane, gate: ActivationGate, load: TripLoad, slab: SlabWalk) -> None:
        config = MoverConfig(chunk_bytes=load.chunk_bytes)
        self.mover = Mover(lane, gate, config, _always, _store_in(slab))
        self.sent_bytes = 0
        self._slab = slab
        self._numbers = count()
        self._under_way = 0
        self.mover.start()

    def feed(self) -> None:
        """Keep two transfers under way; counts what has ended."""
        for event in self.mover.events():
            if isinstance(event, TransferSent):
                self.sent_bytes += event.size_bytes
                self._under_way -= 1
        while self._under_way < 2:
            name = f"part {next(self._numbers)}"
            cut = SlabCut(name, name, TRANSFER_BYTES)
            piece_bytes = partial(self.mover.piece_bytes, PEER.worker_id)
            pieces = parameter_pieces(cut, piece_bytes, self._pack)
            self.mover.send(name, PEER.worker_id, "", 0, pieces)
            self._under_way += 1

    def bytes_per_s(self) -> float:
        """Nothing but bulk, for `ALONE_S`."""
        began_s, before_bytes = monotonic_s(), self.sent_bytes
        while monotonic_s() < began_s + ALONE_S:
            self.feed()
            select.select([self.mover], [], [], ALONE_S)
        return (self.sent_bytes - before_bytes) / (monotonic_s() - began_s)

    def drain(self) -> None:
        """Wait until all transfers have ended."""
        end_s = monotonic_s() + TRIP_TIMEOUT_S
        while self._under_way and monotonic_s() < end_s:
            select.select([self.mover], [], [], 1.0)
            self._under_way -= len([e for e in self.mover.events() if isinstance(e, TransferSent)])

    def _pack(self, offset_bytes: int, target: Bytes) -> None:
        target[:] = self._slab.next(target.size)


def measure_in(config: UcxLaneConfig, load: TripLoad) -> LaneReport:
    """Start the other process and measure. Raises UcxUnavailable, OSError."""
    gate = ActivationGate()
    with _echoing_peer(config) as (addresses, nonces), plain_stream(config.ucx) as plain:
        activations, bulk_lane = _lanes(US, config)
        for lane, address, nonce in zip((activations, bulk_lane), addresses, nonces, strict=True):
            lane.connect(PEER.worker_id, address, nonce)
        slab = SlabWalk.of_a_slab()
        bulk = _BulkStream(bulk_lane, gate, load, slab)
        idle, coordinated, uncoordinated = _Tally(), _Tally(), _Tally()
        rates: list[tuple[float, float, float]] = []
        try:
            _trips(activations, gate, load, WARM_UP_TRIPS, None, _Tally())
            for _ in range(ROUNDS):
                trips = max(1, load.trips // ROUNDS)
                _trips(activations, gate, load, trips, None, idle)
                bulk.mover.coordinated = True
                _trips(activations, gate, load, trips, bulk, coordinated)
                bulk.mover.coordinated = False
                _trips(activations, gate, load, trips, bulk, uncoordinated)
                bulk_bytes_per_s = bulk.bytes_per_s()
                bulk.drain()
                plain_bytes_per_s = plain.bytes_per_s(PLAIN_MESSAGES, slab)
                cached_bytes_per_s = plain.cached_bytes_per_s(PLAIN_MESSAGES)
                rates.append((bulk_bytes_per_s, plain_bytes_per_s, cached_bytes_per_s))
        finally:
            bulk.mover.close()
            activations.close()
            bulk_lane.close()
    return LaneReport(
        load.payload_bytes,
        load.chunk_bytes,
        idle.result(),
        coordinated.result(),
        uncoordinated.result(),
        slab.memory.size,
        *(median(kind) for kind in zip(*rates, strict=True)),
    )


def _trips(
    lane: UcxLane,
    gate: ActivationGate,
    load: TripLoad,
    trips: int,
    bulk: _BulkStream | None,
    tally: _Tally,
) -> None:
    """Make round trips beside the traffic of `bulk`."""
    payload = np.ones(load.payload_bytes, np.uint8)
    began_s, before_bytes = monotonic_s(), bulk.sent_bytes if bulk is not None else 0
    for trip in range(trips):
        if bulk is not None:
            bulk.feed()
        sleep(load.pause_s)
        started_s = monotonic_s()
        gate.send(lane, PEER.worker_id, Frame("", 0, Ping(trip), payload))
        _await_echo(lane, started_s + TRIP_TIMEOUT_S)
        tally.durations_s.append(monotonic_s() - started_s)
    tally.elapsed_s += monotonic_s() - began_s
    tally.bulk_bytes += bulk.sent_bytes - before_bytes if bulk is not None else 0


def _await_echo(lane: UcxLane, until_s: float) -> None:
    while not lane.receive():
        left_s = until_s - monotonic_s()
        if left_s <= 0 or any(isinstance(event, PeerLost) for event in lane.events()):
            raise LaneClosed("the other process does not answer")
        select.select([lane], [], [], left_s)


def _lanes(identity: Identity, config: UcxLaneConfig) -> tuple[UcxLane, UcxLane]:
    """The lanes of an engine; its mover verifies bulk by itself."""
    bulk = replace(config, verify=False)
    return UcxLane(identity, CODEC, config), UcxLane(identity, CODEC, bulk)


@contextmanager
def _echoing_peer(config: UcxLaneConfig) -> Iterator[tuple[Sequence[str], Sequence[bytes]]]:
    """Start the other process; gives the addresses and nonces of its lanes."""
    nonces = [secrets.token_bytes(16) for _ in range(2)]
    command = [sys.executable, "-m", __spec__.name, "--echo"]
    command += ["--transports", config.ucx.transports]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdin is None or process.stdout is None:
                raise OSError("the other process has no pipes")
            process.stdin.write(b"".join(nonce.hex().encode() + b"\n" for nonce in nonces))
            process.stdin.flush()
            yield [process.stdout.readline().decode().strip() for _ in nonces], nonces
        finally:
            process.kill()


def echo(config: UcxLaneConfig) -> None:
    """Send activations back and store bulk, until this process is killed."""
    die_with_parent()
    activations, bulk = _lanes(PEER, config)
    gate = ActivationGate()
    mover = Mover(bulk, gate, MoverConfig(), _always, _store_in(SlabWalk.of_a_slab()))
    mover.start()
    for lane in (activations, bulk):
        lane.expect(US, bytes.fromhex(sys.stdin.readline().strip()))
        print(lane.address, flush=True)
    while True:
        select.select([activations], [], [], 1.0)
        for peer, frame in activations.receive():
            gate.send(activations, peer, frame)
        mover.events()


def _always(group_id: str, epoch: int) -> Standing:
    return Standing.CURRENT


def _store_in(slab: SlabWalk) -> Unpack:
    """Has pieces copied to a slab, as an engine does."""

    def store(piece: BulkPiece, payload: Bytes) -> None:
        slab.next(payload.size)[:] = payload

    return store


def main() -> None:
    """Print a report."""
    parser = argparse.ArgumentParser(description="Round trips of activations beside bulk.")
    parser.add_argument("--echo", action="store_true", help="be the other process")
    parser.add_argument("--trips", type=int, default=TripLoad().trips)
    parser.add_argument("--chunk-bytes", type=int, default=TripLoad().chunk_bytes)
    parser.add_argument("--transports", default=UcxConfig().transports)
    arguments = parser.parse_args()
    config = UcxLaneConfig(ucx=UcxConfig(arguments.transports))
    if arguments.echo:
        echo(config)
    load = TripLoad(trips=arguments.trips, chunk_bytes=arguments.chunk_bytes)
    print(json.dumps(asdict(measure_in(config, load))))


if __name__ == "__main__":
    main()
