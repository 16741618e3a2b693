"""Settings of a lane (frames between engines) over UCX."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UcxConfig:
    """The UCX transports of a lane.

    `rendezvous_bytes`: messages of at least that size stay in their sender's memory until the
    receiver fetches them, and occupy no buffers of UCX.

    `segment_bytes`: size of a segment in shared memory, of which a lane has 256. The sender copies
    into segments, the receiver out of them. If the messages in flight do not fit, the sender
    busy-waits until the receiver's process runs.
    """

    transports: str = "sm,tcp"  # UCX_TLS: shared memory first, then TCP
    devices: str = "lo"  # UCX_NET_DEVICES for TCP; empty: all
    ports: str = ""  # UCX_TCP_PORT_RANGE, "from-to", one port per device; empty: any
    rendezvous_bytes: int = 65_536
    segment_bytes: int = 32_768

    def options(self) -> dict[str, str]:
        """Return the options by UCX's names, without the prefix UCX_."""
        # Without the two *_ERROR_HANDLING options UCX would not use shared memory here.
        options = {
            "TLS": self.transports,
            "RNDV_THRESH": str(self.rendezvous_bytes),
            "SYSV_SEG_SIZE": str(self.segment_bytes),
            "POSIX_ERROR_HANDLING": "y",
            "SYSV_ERROR_HANDLING": "y",
        }
        chosen = {"NET_DEVICES": self.devices, "TCP_PORT_RANGE": self.ports}
        return options | {name: value for name, value in chosen.items() if value}


@dataclass(frozen=True, slots=True)
class UcxLaneConfig:
    """Settings of a lane. Hosts may be names.

    `verify`: the lane verifies the checksums of frames, and closes the connection to the sender of
    a damaged frame. Otherwise the receiver of a frame calls `Frame.verify`.
    """

    host: str = "127.0.0.1"  # to listen on for handshakes
    port: int = 0  # to listen on for handshakes; 0: any free port
    advertise: str = ""  # host that peers dial
    ucx: UcxConfig = field(default_factory=UcxConfig)
    verify: bool = True
    frame_bytes_max: int = 64 << 20
    queue_bytes_max: int = 64 << 20  # per peer: frames not sent yet
    frames_in_flight_max: int = 1024  # per peer: frames not taken by its engine yet
    received_bytes_max: int = 64 << 20  # of all peers: frames not taken by this engine yet
    connect_timeout_s: float = 5.0
    hello_timeout_s: float = 1.0
    nonce_lifetime_s: float = 60.0
    heartbeat_s: float = 1.0
    silence_timeout_s: float = 5.0  # without heartbeats, after which a peer is lost
    send_timeout_s: float = 30.0
    name: str = "lane"  # in logs
