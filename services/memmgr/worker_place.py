"""Where a registered worker is reached."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a registered worker is reached: RPC, and its lanes to other members.

    `draining`: not for long.
    """

    address: str
    activation_address: str
    bulk_address: str
    draining: bool = False
