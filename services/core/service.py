"""Class, latency targets, rank and tenant of a request (`Service`); shared by all services."""

import math
from dataclasses import dataclass
from enum import StrEnum

TENANT_CHARS_MAX = 256
"""Maximum length of a tenant name."""


class ServiceClass(StrEnum):
    """Service classes, the most urgent first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Service:
    """A request's class, its targets in seconds from the arrival at the gateway, and its tenant.

    None means no target. `ttft_s` is the target of the first token, `tpot_s` that of each later
    token, as an average over `token_group` tokens. Requests with a smaller `rank` go first within
    their class, unless deadlines order them. The setting `scheduling` decides whether the fields
    have an effect, see `queue_order.py`; `tpot_s` has an effect only under policies with deadlines.
    """

    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_s: float | None = None
    tpot_s: float | None = None
    token_group: int = 1
    rank: int = 0
    tenant: str = ""

    @property
    def online(self) -> bool:
        """Whether the request is latency-sensitive: all classes except `batch`."""
        return self.service_class is not ServiceClass.BATCH

    def fault(self) -> str | None:
        """Description of the first invalid field; None if all fields are valid."""
        for name, seconds in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if seconds is not None and not 0 < seconds < math.inf:
                return f"{name} of service must be finite and above 0"
        if self.token_group < 1:
            return "token_group of service must be at least 1"
        if len(self.tenant) > TENANT_CHARS_MAX:
            return f"tenant of service must have at most {TENANT_CHARS_MAX} characters"
        return None


DEFAULT_SERVICE = Service()
"""The class `standard` without targets, rank or tenant."""
