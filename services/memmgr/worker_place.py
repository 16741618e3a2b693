"""The addresses of a registered worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The addresses of a registered worker: RPC, and its lanes to other members.

    `draining`: it is leaving.
    """

    address: str
    activation_address: str
    bulk_address: str
    draining: bool = False
