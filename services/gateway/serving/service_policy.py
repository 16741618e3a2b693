"""Determines the service class and SLO targets (TTFT, TPOT) of a request."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.service import Service, ServiceClass
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
OBJECTIVE_HEADER = "x-gateway-inference-objective"
EXPECTED_HEADER = "x-expected-output-tokens"
SLO_HEADERS = (TTFT_HEADER, TPOT_HEADER, OBJECTIVE_HEADER, EXPECTED_HEADER)
"""HTTP headers and gRPC metadata keys that say how to schedule a request.

All but `EXPECTED_HEADER` are equivalent to the fields `slo` and `slo_class`.
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
    """Maps request fields, headers and the operator's configuration to a `Service`."""

    targets: Mapping[ServiceClass, ClassTargets] = field(default_factory=lambda: DEFAULT_TARGETS)
    default_class: ServiceClass = ServiceClass.STANDARD

    def service_of(
        self, body: GenerationRequest, headers: Mapping[str, str], tenant: str = ""
    ) -> Service:
        """The class and targets of a request; `headers` has keys of `SLO_HEADERS`.

        A target of the request overrides that of its class.

        Raises:
            BadRequest: if two fields name different classes, or a target is invalid.
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
            tenant=tenant,
        )


def expected_tokens_of(headers: Mapping[str, str]) -> int:
    """The client's estimate of its output tokens; 0 without. Raises BadRequest."""
    text = headers.get(EXPECTED_HEADER, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise BadRequest(
            f"'{EXPECTED_HEADER}' must be a number of tokens below 10^9; correct it",
            param=EXPECTED_HEADER,
        )
    return int(text)


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
    if (objective := headers.get(OBJECTIVE_HEADER)) is not None:
        try:
            named[OBJECTIVE_HEADER] = ServiceClass(objective)
        except ValueError:
            raise BadRequest(
                f"'{OBJECTIVE_HEADER}' must be one of {', '.join(ServiceClass)}; correct it",
                param=OBJECTIVE_HEADER,
            ) from None
    if len(set(named.values())) > 1:
        fields = " and ".join(f"'{name}' class '{value}'" for name, value in named.items())
        raise BadRequest(f"{fields} differ; name a single class", param=next(iter(named)))
    return named


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
