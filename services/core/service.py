"""What a request is promised, in the words that every service shares."""

import math
from dataclasses import dataclass
from enum import StrEnum

TENANT_CHARS_MAX = 256
"""Longest name of an owner of keys."""


class ServiceClass(StrEnum):
    """Which promise a request has been given, the most urgent first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Service:
    """A request's class, its targets in seconds from the arrival at the gateway, and its tenant.

    A target of None promises nothing. `tpot_s` holds on average over `token_group` tokens; a
    smaller `rank` is earlier within the class. Every message carries these fields. Class, rank and
    tenant count by the setting `scheduling`, `ttft_s` by the scheduler's `order` too, `tpot_s` with
    `slo` at the workers.
    """

    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_s: float | None = None
    tpot_s: float | None = None
    token_group: int = 1
    rank: int = 0
    tenant: str = ""

    @property
    def online(self) -> bool:
        """Whether somebody waits for the answer: all classes but `batch`."""
        return self.service_class is not ServiceClass.BATCH

    def fault(self) -> str | None:
        """Which number or name cannot be, and what it must be; None if all can."""
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
