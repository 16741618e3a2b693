"""The other engine of transfer tests, as a process: `python -m tests.support.transfer_peer TLS`.

It expects one peer on an activation lane, whose notes it echoes, and on a bulk lane, whose
transfers it stores. It prints its addresses and then, as JSON lines, what its mover reports; a line
on standard input is the id of a slab transfer to begin. It ends with its standard input.
"""

import hashlib
import json
import select
import sys
from functools import partial

import numpy as np

from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity
from services.worker.engine.transfer.mover import Mover, MoverConfig
from services.worker.engine.transfer.pieces import parameter_pieces
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane
from tests.support.transfer import CODEC, NONCE, Memory, filled

SLAB_BYTES = 16 << 20
TESTER = Identity("tester", "1")
PEER = Identity("peer", "1")


def lane(identity: Identity, transports: str, silence_timeout_s: float = 30.0) -> UcxLane:
    """A lane as the tests use it."""
    # A busy machine may delay a process for longer than the default timeouts.
    config = UcxLaneConfig(
        ucx=UcxConfig(transports),
        connect_timeout_s=60.0,
        hello_timeout_s=5.0,
        silence_timeout_s=silence_timeout_s,
    )
    return UcxLane(identity, CODEC, config)


def digest_of(memory: Bytes) -> str:
    """A digest to compare the memories of two processes."""
    return hashlib.sha256(memory).hexdigest()


def say(**facts: object) -> None:
    """Print a line for the test."""
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Serve until standard input ends."""
    transports = sys.argv[1]
    activations, bulk = lane(PEER, transports), lane(PEER, transports)
    memory = Memory(np.zeros(SLAB_BYTES, np.uint8), np.zeros((1, 1, 1), np.uint8))
    mover = Mover(bulk, ActivationGate(), MoverConfig(), memory.standing, memory.unpack)
    mover.start()
    for own_lane in (activations, bulk):
        own_lane.expect(TESTER, NONCE)
    say(activations=activations.address, bulk=bulk.address)
    while True:
        readable, _, _ = select.select([activations, mover, sys.stdin], [], [], 60.0)
        if sys.stdin in readable:
            transfer_id = sys.stdin.readline().strip()
            if not transfer_id:
                break
            own = filled(SLAB_BYTES, seed=9)
            cut = own.slab_cut(transfer_id)
            pieces = parameter_pieces(
                cut, partial(mover.piece_bytes, TESTER.worker_id), own.pack_slab
            )
            mover.send(transfer_id, TESTER.worker_id, "g", 1, pieces)
        for peer, frame in activations.receive():
            activations.send(peer, frame)
        for event in mover.events():
            status = getattr(event, "status", "")
            say(status=status, detail=str(event), digest=digest_of(memory.slab))
    mover.close()
    activations.close()
    bulk.close()


if __name__ == "__main__":
    main()
