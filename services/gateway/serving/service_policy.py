"""Determines the service class and SLO targets (TTFT, TPOT) of a request."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.service import TENANT_CHARS_MAX, Service, ServiceClass
from services.gateway.api.generation import GenerationRequest
from services.gateway.vocabulary.class_targets import (
    DEFAULT_TARGETS,
    NO_TARGETS,
    TARGET_MS_MAX,
    ClassTargets,
)
from services.gateway.vocabulary.errors import BadRequest

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
# Names of the Gateway API Inference Extension, and those of llm-d from 0.8 on.
OBJECTIVE_HEADERS = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
FAIRNESS_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
EXPECTED_HEADER = "x-expected-output-tokens"
SESSION_HEADER = "x-session-id"
SLO_HEADERS = (
    *(TTFT_HEADER, TPOT_HEADER, EXPECTED_HEADER, SESSION_HEADER),
    *(*OBJECTIVE_HEADERS, *FAIRNESS_HEADERS),
)
"""HTTP headers and gRPC metadata keys that say how to schedule a request.

The headers of targets and objectives are equivalent to the fields `slo` and `slo_class`.
"""

# Values of the OpenAI field `service_tier`.
_TIERS = {
    "priority": ServiceClass.INTERACTIVE,
    "default": ServiceClass.STANDARD,
    "scale": ServiceClass.STANDARD,
    "flex": ServiceClass.BATCH,
}


@dataclass(frozen=True, slots=True)
class ServicePolicy:
    """Maps request fields, headers and the operator's configuration to a `Service`.

    `fairness_header`: the `FAIRNESS_HEADERS` name the tenant of requests without an owner.
    `session_affinity`: requests of a session prefer the same group.
    """

    targets: Mapping[ServiceClass, ClassTargets] = field(default_factory=lambda: DEFAULT_TARGETS)
    default_class: ServiceClass = ServiceClass.STANDARD
    fairness_header: bool = False
    session_affinity: bool = True

    def service_of(
        self, body: GenerationRequest, headers: Mapping[str, str], tenant: str = ""
    ) -> Service:
        """The class and targets of a request; `headers` has keys of `SLO_HEADERS`.

        A target of the request overrides that of its class.

        Raises:
            BadRequest: if two fields name different classes or tenants, or a target is invalid.
        """
        slo = body.slo
        ttft_ms = _target(headers, TTFT_HEADER) or (slo.ttft_ms if slo is not None else None)
        tpot_ms = _target(headers, TPOT_HEADER) or (slo.tpot_ms if slo is not None else None)
        has_targets = ttft_ms is not None or tpot_ms is not None
        named = _classes(body, headers)
        service_class = next(iter(named.values()), None)
        if service_class is None:
            # Targets imply an online request, so a default of `batch` does not apply.
            batch = self.default_class is ServiceClass.BATCH
            service_class = ServiceClass.STANDARD if has_targets and batch else self.default_class
        if service_class is ServiceClass.BATCH and has_targets:
            raise _targets_of_batch(next(iter(named)), headers)
        of_class = self.targets.get(service_class, NO_TARGETS)
        return Service(
            service_class=service_class,
            ttft_s=_seconds(ttft_ms or of_class.ttft_ms),
            tpot_s=_seconds(tpot_ms or of_class.tpot_ms),
            token_group=of_class.token_group,
            rank=body.priority or 0,
            tenant=tenant or (_fairness_id(headers) if self.fairness_header else ""),
        )

    def affinity_of(self, body: GenerationRequest, headers: Mapping[str, str], tenant: str) -> int:
        """A hash of the request's session and tenant; 0 without a session."""
        session = body.prompt_cache_key or body.session_id or headers.get(SESSION_HEADER)
        if not session or not self.session_affinity:
            return 0
        data = f"{tenant}\0{session}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) or 1


def expected_tokens_of(headers: Mapping[str, str]) -> int:
    """The client's estimate of its output tokens; 0 without. Raises BadRequest."""
    text = headers.get(EXPECTED_HEADER, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise BadRequest(
            f"'{EXPECTED_HEADER}' must be a number of tokens below 10^9; correct it",
            param=EXPECTED_HEADER,
        )
    return int(text)


def _fairness_id(headers: Mapping[str, str]) -> str:
    """The tenant that a proxy names; "" without. Raises BadRequest."""
    named = {name: headers[name] for name in FAIRNESS_HEADERS if name in headers}
    if len(set(named.values())) > 1:
        raise BadRequest(
            f"{' and '.join(map(repr, named))} differ; send one of them", param=next(iter(named))
        )
    tenant = next(iter(named.values()), "")
    if len(tenant) > TENANT_CHARS_MAX or not tenant.isprintable():
        raise BadRequest(
            f"'{next(iter(named))}' must have at most {TENANT_CHARS_MAX} printable characters;"
            " shorten it",
            param=next(iter(named)),
        )
    return tenant


def _seconds(target_ms: float | None) -> float | None:
    return None if target_ms is None else target_ms / 1000


def _targets_of_batch(class_field: str, headers: Mapping[str, str]) -> BadRequest:
    """The error for a batch request with SLO targets; `class_field` selects the class."""
    fields = [name for name in (TTFT_HEADER, TPOT_HEADER) if name in headers]
    target = fields[0] if fields else "slo"
    return BadRequest(
        f"'{class_field}' puts the request into class 'batch', which has no SLO targets; remove"
        f" '{target}' or '{class_field}'",
        param=target,
    )


def _classes(body: GenerationRequest, headers: Mapping[str, str]) -> dict[str, ServiceClass]:
    """The service class that each field of the request selects, by field name.

    Raises:
        BadRequest: if two fields name different classes, or a header has an unknown class.
    """
    named: dict[str, ServiceClass] = {}
    if (tier := _TIERS.get(body.service_tier or "")) is not None:
        named["service_tier"] = tier
    if body.priority:
        named["priority"] = ServiceClass.INTERACTIVE if body.priority < 0 else ServiceClass.BATCH
    if body.slo_class is not None:
        named["slo_class"] = ServiceClass(body.slo_class)
    for name in OBJECTIVE_HEADERS:
        if (objective := headers.get(name)) is not None:
            named[name] = _objective(name, objective)
    if len(set(named.values())) > 1:
        fields = " and ".join(f"'{name}' class '{value}'" for name, value in named.items())
        raise BadRequest(f"{fields} differ; name a single class", param=next(iter(named)))
    return named


def _objective(name: str, value: str) -> ServiceClass:
    try:
        return ServiceClass(value)
    except ValueError:
        raise BadRequest(
            f"'{name}' must be one of {', '.join(ServiceClass)}; correct it", param=name
        ) from None


def _target(headers: Mapping[str, str], name: str) -> float | None:
    if (text := headers.get(name)) is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= TARGET_MS_MAX:
        raise BadRequest(
            f"'{name}' must be 1 to {TARGET_MS_MAX} milliseconds; correct it",
            param=name,
        )
    return number
