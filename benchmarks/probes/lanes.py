"""Round trips of activations during bulk transfers, between two processes of this machine.

`python -m benchmarks.probes.lanes` prints its result as JSON. It measures in a dedicated process
with a peer, like the engines of a group. A second peer receives plain UCX messages, without
framing, copies or checksums, as the baseline. Memory is traversed in order: either more than the
caches hold, as in transfers of parameters and KV, or a few buffers repeatedly.
"""

import argparse
import json
import secrets
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from services.common.clock import monotonic_s
from services.common.lifecycle import die_with_parent
from services.core.changeover.epoch_fence import EpochStatus
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.worker.engine.transfer.errors import LaneClosed
from services.worker.engine.transfer.frame import Bytes, Frame, FrameCodec
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity, PeerLost
from services.worker.engine.transfer.mover import Mover, MoverConfig
from services.worker.engine.transfer.pieces import BULK_KINDS, BulkPiece, SlabCut, parameter_pieces
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane
from services.worker.engine.transfer.ucx_transport import Endpoint, UcxRequest, UcxTransport

TRANSFER_BYTES = 16 << 20
WARM_UP_TRIPS = 50
TIMEOUT_S = 30.0
ROUNDS = 10  # the kinds alternate, so that other load affects all of them equally
ALONE_S = 0.3
PAUSE_S = 0.002
"""Pause between round trips, about the execution time of a stage."""
PAYLOAD_BYTES = 8192
PLAIN_MESSAGES, PLAIN_BYTES, PLAIN_UNDER_WAY, PLAIN_BUFFERS = 300, 1 << 20, 2, 8
CACHED_TAG, SLAB_TAG = 1, 2
"""Tags of plain messages, by the memory that receives them."""
SLAB_BYTES_MIN = 256 << 20
CACHE_TIMES = 4
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
US, PEER = Identity("measuring", "1"), Identity("echoing", "1")


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """An activation frame that the peer echoes."""

    trip: int


CODEC = FrameCodec({1: Ping, **BULK_KINDS})


@dataclass(slots=True)
class SlabWalk:
    """Iterates over parts of `memory`, wrapping around at its end."""

    memory: npt.NDArray[np.uint8]
    _next: int = 0

    @classmethod
    def of(cls, size_bytes: int) -> "SlabWalk":
        """A walk over `size_bytes` of touched memory."""
        return cls(np.ones(size_bytes, np.uint8))

    def next(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """A view of the next part; `size_bytes` is at most the size of the memory."""
        if self._next + size_bytes > self.memory.size:
            self._next = 0
        first, self._next = self._next, self._next + size_bytes
        return self.memory[first : self._next]


def slab_bytes(last_cache: Path = LAST_CACHE) -> int:
    """Several times the last-level cache size, which is read from `last_cache` ("32768K")."""
    try:
        cache_bytes = int(last_cache.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        cache_bytes = 0
    return max(SLAB_BYTES_MIN, CACHE_TIMES * cache_bytes)


@dataclass(slots=True)
class _Tally:
    """Measurements of a kind over all rounds."""

    durations_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    bulk_bytes: int = 0

    def result(self) -> dict[str, float]:
        """Nearest-rank percentiles, and the bulk traffic during the round trips."""
        ordered = sorted(self.durations_s)
        p50, p99 = (ordered[(len(ordered) - 1) * share // 100] for share in (50, 99))
        bulk = self.bulk_bytes / self.elapsed_s
        return {"p50_s": p50, "p99_s": p99, "bulk_bytes_per_s": bulk}


class _BulkStream:
    """Transfers of slab parts to the peer, two in flight."""

    def __init__(self, lane: UcxLane, gate: ActivationGate, chunk_bytes: int) -> None:
        self.slab = SlabWalk.of(slab_bytes())
        self.mover = _mover(lane, gate, self.slab, chunk_bytes)
        self.sent_bytes = 0
        self._numbers = count()
        self._under_way = 0

    def feed(self) -> None:
        """Keep two transfers in flight, and count finished transfers."""
        self._note_sent()
        while self._under_way < 2:
            name = f"part {next(self._numbers)}"
            cut = SlabCut(name, name, TRANSFER_BYTES)
            piece_bytes = partial(self.mover.piece_bytes, PEER.worker_id)
            pieces = parameter_pieces(cut, piece_bytes, self._pack)
            self.mover.send(name, PEER.worker_id, "", 0, pieces)
            self._under_way += 1

    def bytes_per_s(self) -> float:
        """Throughput of bulk alone for `ALONE_S`, until all of it has arrived."""
        began_s, before_bytes = monotonic_s(), self.sent_bytes
        while monotonic_s() < began_s + ALONE_S:
            self.feed()
            select.select([self.mover], [], [], ALONE_S)
        speed = (self.sent_bytes - before_bytes) / (monotonic_s() - began_s)
        end_s = monotonic_s() + TIMEOUT_S
        while self._under_way and monotonic_s() < end_s:
            select.select([self.mover], [], [], 1.0)
            self._note_sent()
        return speed

    def _note_sent(self) -> None:
        for event in self.mover.events():
            if isinstance(event, TransferOutcome) and event.status is TransferStatus.SENT:
                self.sent_bytes += event.size_bytes
                self._under_way -= 1

    def _pack(self, offset_bytes: int, target: Bytes) -> None:
        target[:] = self.slab.next(target.size)


def measure_in(config: UcxLaneConfig, trips: int, chunk_bytes: int) -> dict[str, Any]:
    """Measure round trips alone, during yielding bulk, and during bulk that does not yield.

    `bulk_bytes_per_s` is bulk alone from slab to slab, `plain_bytes_per_s` UCX without lanes, and
    `plain_cached_bytes_per_s` the same within the caches; all are medians.
    Raises UcxUnavailable, OSError, LaneClosed.
    """
    gate = ActivationGate()
    nonces = [secrets.token_bytes(16) for _ in range(2)]
    lines = [config.ucx.transports, *(nonce.hex() for nonce in nonces)]
    with _peer("--echo", lines) as echoing, plain_stream(config.ucx) as plain:
        activations, bulk_lane = _lanes(US, config)
        for lane, nonce in zip((activations, bulk_lane), nonces, strict=True):
            lane.connect(PEER.worker_id, _line(echoing), nonce)
        bulk = _BulkStream(bulk_lane, gate, chunk_bytes)
        idle, coordinated, uncoordinated = _Tally(), _Tally(), _Tally()
        cached = SlabWalk.of(PLAIN_UNDER_WAY * PLAIN_BYTES)
        rates: list[tuple[float, float, float]] = []
        try:
            # Warm up connections and caches without counting.
            _trips(activations, gate, WARM_UP_TRIPS, None, _Tally())
            for _ in range(ROUNDS):
                own = max(1, trips // ROUNDS)
                _trips(activations, gate, own, None, idle)
                bulk.mover.coordinated = True
                _trips(activations, gate, own, bulk, coordinated)
                bulk.mover.coordinated = False
                _trips(activations, gate, own, bulk, uncoordinated)
                rates.append(
                    (
                        bulk.bytes_per_s(),
                        plain.bytes_per_s(bulk.slab, SLAB_TAG),
                        plain.bytes_per_s(cached, CACHED_TAG),
                    )
                )
        finally:
            bulk.mover.close()
            activations.close()
            bulk_lane.close()
    bulk_speed, plain_speed, cached_speed = (median(kind) for kind in zip(*rates, strict=True))
    return {
        "payload_bytes": PAYLOAD_BYTES,
        "chunk_bytes": chunk_bytes,
        "idle": idle.result(),
        "coordinated": coordinated.result(),
        "uncoordinated": uncoordinated.result(),
        "slab_bytes": bulk.slab.memory.size,
        "bulk_bytes_per_s": bulk_speed,
        "plain_bytes_per_s": plain_speed,
        "plain_cached_bytes_per_s": cached_speed,
    }


def _trips(
    lane: UcxLane, gate: ActivationGate, trips: int, bulk: _BulkStream | None, tally: _Tally
) -> None:
    """Time round trips during the traffic of `bulk`."""
    payload = np.ones(PAYLOAD_BYTES, np.uint8)
    began_s, before_bytes = monotonic_s(), bulk.sent_bytes if bulk is not None else 0
    for trip in range(trips):
        if bulk is not None:
            bulk.feed()
        sleep(PAUSE_S)
        started_s = monotonic_s()
        gate.send(lane, PEER.worker_id, Frame("", 0, Ping(trip), payload))
        while not lane.receive():
            left_s = started_s + TIMEOUT_S - monotonic_s()
            if left_s <= 0 or any(isinstance(event, PeerLost) for event in lane.events()):
                raise LaneClosed("the peer does not answer")
            select.select([lane], [], [], left_s)
        tally.durations_s.append(monotonic_s() - started_s)
    tally.elapsed_s += monotonic_s() - began_s
    tally.bulk_bytes += bulk.sent_bytes - before_bytes if bulk is not None else 0


def _lanes(identity: Identity, config: UcxLaneConfig) -> tuple[UcxLane, UcxLane]:
    """The lanes of an engine; the mover verifies bulk itself."""
    bulk = replace(config, verify=False)
    return UcxLane(identity, CODEC, config), UcxLane(identity, CODEC, bulk)


def _mover(lane: UcxLane, gate: ActivationGate, slab: SlabWalk, chunk_bytes: int) -> Mover:
    """A mover that stores received pieces in `slab`, as in an engine."""

    def store(piece: BulkPiece, payload: Bytes) -> None:
        slab.next(payload.size)[:] = payload

    config = MoverConfig(chunk_bytes=chunk_bytes)
    mover = Mover(lane, gate, config, lambda group_id, epoch: EpochStatus.CURRENT, store)
    mover.start()
    return mover


@contextmanager
def _peer(role: str, lines: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Run this module as a peer process in `role`; `lines` are its input."""
    command = [sys.executable, "-m", __spec__.name, role]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if process.stdin is None:
                raise OSError("the peer has no pipes")
            process.stdin.writelines(f"{line}\n" for line in lines)
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def _line(process: "subprocess.Popen[str]") -> str:
    return process.stdout.readline().strip() if process.stdout is not None else ""


def echo() -> None:
    """Echo activations and store bulk until this process is killed."""
    die_with_parent()
    transports, *nonces = (sys.stdin.readline().strip() for _ in range(3))
    activations, bulk = _lanes(PEER, UcxLaneConfig(ucx=UcxConfig(transports)))
    gate = ActivationGate()
    mover = _mover(bulk, gate, SlabWalk.of(slab_bytes()), MoverConfig().chunk_bytes)
    for lane, nonce in zip((activations, bulk), nonces, strict=True):
        lane.expect(US, bytes.fromhex(nonce))
        print(lane.address, flush=True)
    while True:
        select.select([activations], [], [], 1.0)
        for peer, frame in activations.receive():
            gate.send(activations, peer, frame)
        mover.events()


@dataclass(frozen=True, slots=True)
class PlainStream:
    """Sender of plain messages. Its peer busy-polls, so it is suspended in between."""

    transport: UcxTransport
    endpoint: Endpoint
    peer: "subprocess.Popen[str]"

    def bytes_per_s(self, memory: SlabWalk, tag: int) -> float:
        """Send `PLAIN_MESSAGES` and wait until all are received. Raises LaneClosed."""
        self.peer.send_signal(signal.SIGCONT)
        try:
            under_way: deque[UcxRequest] = deque()
            began_s = monotonic_s()
            for _ in range(PLAIN_MESSAGES):
                self._await(under_way, PLAIN_UNDER_WAY - 1)
                under_way.append(self.endpoint.send(memory.next(PLAIN_BYTES), tag))
            self._await(under_way, 0)
            return PLAIN_MESSAGES * PLAIN_BYTES / (monotonic_s() - began_s)
        finally:
            self.peer.send_signal(signal.SIGSTOP)

    def _await(self, under_way: deque[UcxRequest], most: int) -> None:
        until_s = monotonic_s() + TIMEOUT_S
        while len(under_way) > most:
            self.transport.progress()
            if under_way[0].completed:
                under_way.popleft()
            elif monotonic_s() > until_s:
                raise LaneClosed("the peer receives nothing")


@contextmanager
def plain_stream(config: UcxConfig) -> Iterator[PlainStream]:
    """Start the peer. Raises UcxUnavailable, OSError, ConnectionError."""
    transport = UcxTransport(config)
    lines = [config.transports, config.devices, transport.address.hex()]
    with _peer("--take", lines) as process:
        address = bytes.fromhex(_line(process))
        process.send_signal(signal.SIGSTOP)
        yield PlainStream(transport, transport.open(address), process)


def take() -> None:
    """Receive and discard plain messages until this process is killed."""
    die_with_parent()
    transports, devices, address = (sys.stdin.readline().strip() for _ in range(3))
    transport = UcxTransport(UcxConfig(transports, devices))
    memory = {
        CACHED_TAG: SlabWalk.of(PLAIN_BUFFERS * PLAIN_BYTES),
        SLAB_TAG: SlabWalk.of(slab_bytes()),
    }
    print(transport.address.hex(), flush=True)
    endpoint = transport.open(bytes.fromhex(address))
    under_way: deque[UcxRequest] = deque()
    while endpoint.alive:
        transport.progress()
        while under_way and under_way[0].completed:
            under_way.popleft()
        # Limit the fetches in flight to the buffers, so that none is overwritten.
        arrival = transport.probe() if len(under_way) < PLAIN_BUFFERS else None
        if arrival is not None:
            place = memory[arrival.tag].next(arrival.size_bytes)
            under_way.append(transport.fetch(arrival, place))


def main() -> None:
    """Print a report."""
    parser = argparse.ArgumentParser(description="Round trips of activations during bulk data.")
    parser.add_argument("--echo", action="store_true", help="run as the peer of lanes")
    parser.add_argument("--take", action="store_true", help="run as the peer of plain messages")
    parser.add_argument("--trips", type=int, default=500)
    parser.add_argument("--chunk-bytes", type=int, default=1 << 20)
    parser.add_argument("--transports", default=UcxConfig().transports)
    arguments = parser.parse_args()
    if arguments.echo:
        echo()
    if arguments.take:
        take()
    config = UcxLaneConfig(ucx=UcxConfig(arguments.transports))
    print(json.dumps(measure_in(config, arguments.trips, arguments.chunk_bytes)))


if __name__ == "__main__":
    main()
