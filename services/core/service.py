"""Service terms of a request: class, targets, rank and tenant; shared by all services."""

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

    None means no target. `tpot_s` is an average over `token_group` tokens; a smaller `rank` goes
    first within its class. Every message about a request carries these fields. The setting
    `scheduling` decides whether class, rank and tenant have an effect; the scheduler's `order` also
    uses `ttft_s`; workers use `tpot_s` with `scheduling: slo`.
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


NO_PROMISE = Service()
"""Standard, without targets or tenant."""
