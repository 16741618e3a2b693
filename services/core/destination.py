"""Where a returned request continues, if its KV was shipped to another worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Destination:
    """A worker that has the KV of a request: `address` (host:port), and the group it leads."""

    worker_id: str
    address: str
    group_id: str
    epoch: int
