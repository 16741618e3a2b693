"""What a request is promised, in the words that every service shares."""

from dataclasses import dataclass
from enum import StrEnum


class ServiceClass(StrEnum):
    """Which promise a request has been given."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Service:
    """Class, targets in seconds from the arrival at the gateway (None: no promise), and tenant.

    `tpot_s` holds on average over `token_group` tokens; a smaller `rank` is earlier within the
    class. So far all of it is carried along and changes nothing.
    """

    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_s: float | None = None
    tpot_s: float | None = None
    token_group: int = 1
    rank: int = 0
    tenant: str = ""


NO_PROMISE = Service()
"""Standard, without targets or tenant."""
