"""Settings of a UCX lane."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UcxConfig:
    """The transports of UCX that a lane uses.

    `transports`: UCX_TLS; shared memory first, then TCP on `devices` (UCX_NET_DEVICES; empty: all)
    and `ports` ("from-to", UCX_TCP_PORT_RANGE; empty: any), one port per device. Messages from
    `rendezvous_bytes` on stay at their sender until they are fetched; no buffers of UCX keep them.

    `segment_bytes`: through shared memory the sender copies in and the receiver copies out, by
    segments, of which a lane has 256. Where the pieces under way do not fit, their sender has to
    wait, awake, until the receiver's process runs.
    """

    transports: str = "sm,tcp"
    devices: str = "lo"
    ports: str = ""
    rendezvous_bytes: int = 65_536
    segment_bytes: int = 32_768

    def options(self) -> dict[str, str]:
        """The options by UCX's names. Without the last two, UCX would not use shared memory."""
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
    """`host` and `port` (0: any) are for handshakes; `advertise` is the host that peers dial.

    Either may be a name.

    `verify`: the lane verifies frames, and loses the sender of a damaged one. Otherwise the
    receiver of a frame calls `Frame.verify`. `name`: what logs call the lane.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    ucx: UcxConfig = field(default_factory=UcxConfig)
    verify: bool = True
    frame_bytes_max: int = 64 << 20
    queue_bytes_max: int = 64 << 20
    frames_in_flight_max: int = 1024
    received_bytes_max: int = 64 << 20
    connect_timeout_s: float = 5.0
    hello_timeout_s: float = 1.0
    nonce_lifetime_s: float = 60.0
    heartbeat_s: float = 1.0
    silence_timeout_s: float = 5.0
    send_timeout_s: float = 30.0
    name: str = "lane"
