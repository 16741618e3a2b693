"""A worker's two lanes as a process: `python -m tests.support.lane_node a|b OWN PEER CONFIG`.

OWN and PEER are addresses, CONFIG is JSON of `activation_port`, `bulk_port` and `ucx_ports`. Node a
connects and sends, node b echoes. Each exits with 0 once all frames have arrived; b prints a line
when it listens.
"""

import json
import sys
import time

from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.lane import Identity, PeerConnected, PeerLost
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane
from tests.support.transfer import CODEC, NONCE, Note, bytes_of

FRAMES = 10
FRAME_BYTES = 1 << 20
DEADLINE_S = 60.0


def main(role: str, own: str, peer: str, settings: str) -> int:
    """See the top of the file."""
    config = json.loads(settings)
    ports = (config["activation_port"], config["bulk_port"])
    ucx = UcxConfig("tcp", "", config["ucx_ports"])
    lanes = [
        UcxLane(
            Identity(role, "1"),
            CODEC,
            UcxLaneConfig("0.0.0.0", port, own, ucx, connect_timeout_s=10.0, hello_timeout_s=5.0),
        )
        for port in ports
    ]
    for lane, port in zip(lanes, ports, strict=True):
        if role == "a":
            lane.connect("b", f"{peer}:{port}", NONCE)
        else:
            lane.expect(Identity("a", "1"), NONCE)
    print("listening", flush=True)
    code = exchange(role, lanes)
    for lane in lanes:
        lane.close()
    return code


def exchange(role: str, lanes: list[UcxLane]) -> int:
    """Exit code: 0 once every frame has arrived, 1 when the peer is lost, 2 at the deadline."""
    missing = FRAMES * len(lanes)
    end_s = time.monotonic() + DEADLINE_S
    while missing:
        for lane in lanes:
            for event in lane.events():
                if isinstance(event, PeerLost):
                    return 1
                if isinstance(event, PeerConnected) and role == "a":
                    begin(lane)
            missing -= received(role, lane)
        if time.monotonic() > end_s:
            return 2
        time.sleep(0.005)
    if role == "b":
        sys.stdin.read()
    return 0


def begin(lane: UcxLane) -> None:
    """Send all frames; the lane queues them."""
    for _ in range(FRAMES):
        lane.send("b", Frame("g", 1, Note("there"), bytes_of(FRAME_BYTES)))


def received(role: str, lane: UcxLane) -> int:
    """Number of frames received since the last call; b echoes them."""
    frames = lane.receive()
    for sender, frame in frames if role == "b" else ():
        lane.send(sender, Frame("g", 1, Note("back"), frame.payload))
    return len(frames)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
