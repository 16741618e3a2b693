"""What a request is promised: from a body's fields, known headers and the configuration."""

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
PROMISE_HEADERS = (TTFT_HEADER, TPOT_HEADER, OBJECTIVE_HEADER)
"""Headers, and names of gRPC metadata, that say the same as the fields `slo` and `slo_class`."""

_TIERS = {
    "priority": ServiceClass.INTERACTIVE,
    "default": ServiceClass.STANDARD,
    "scale": ServiceClass.STANDARD,
    "flex": ServiceClass.BATCH,
}


@dataclass(frozen=True, slots=True)
class ServicePolicy:
    """The one place that makes promises of what clients ask for and operators configure."""

    targets: Mapping[ServiceClass, ClassTargets] = field(default_factory=lambda: DEFAULT_TARGETS)
    default_class: ServiceClass = ServiceClass.STANDARD

    def service_of(
        self, body: GenerationRequest, headers: Mapping[str, str], tenant: str = ""
    ) -> Service:
        """The promise of a request; `headers` by the names of `PROMISE_HEADERS`.

        Each target is the request's own, else that of its class.

        Raises:
            BadRequest: if two places name different classes, or a target is none.
        """
        slo = body.slo
        ttft_ms = _target(headers, TTFT_HEADER) or (slo.ttft_ms if slo is not None else None)
        tpot_ms = _target(headers, TPOT_HEADER) or (slo.tpot_ms if slo is not None else None)
        own = ttft_ms is not None or tpot_ms is not None
        named = _classes(body, headers)
        service_class = next(iter(named.values()), None)
        if service_class is None:
            # Somebody waits for a request with targets, whatever the default is.
            batch = self.default_class is ServiceClass.BATCH
            service_class = ServiceClass.STANDARD if own and batch else self.default_class
        if service_class is ServiceClass.BATCH and own:
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


def _seconds(target_ms: float | None) -> float | None:
    return None if target_ms is None else target_ms / 1000


def _targets_of_batch(class_place: str, headers: Mapping[str, str]) -> BadRequest:
    """Says which place names the class and which a target."""
    places = [name for name in (TTFT_HEADER, TPOT_HEADER) if name in headers]
    target = places[0] if places else "slo"
    return BadRequest(
        f"'{class_place}' makes the request one of class 'batch', which has no targets; leave"
        f" '{target}' out, or '{class_place}'",
        param=target,
    )


def _classes(body: GenerationRequest, headers: Mapping[str, str]) -> dict[str, ServiceClass]:
    """The class that the request names, by where it does; BadRequest if two places differ."""
    named: dict[str, ServiceClass] = {}
    if (tier := _TIERS.get(body.service_tier or "")) is not None:
        named["service_tier"] = tier
    if body.priority:
        named["priority"] = ServiceClass.INTERACTIVE if body.priority < 0 else ServiceClass.BATCH
    if body.slo_class is not None:
        named["slo_class"] = ServiceClass(body.slo_class)
    if (told := headers.get(OBJECTIVE_HEADER)) is not None:
        try:
            named[OBJECTIVE_HEADER] = ServiceClass(told)
        except ValueError:
            raise BadRequest(
                f"'{OBJECTIVE_HEADER}' must be one of {', '.join(ServiceClass)}; correct it",
                param=OBJECTIVE_HEADER,
            ) from None
    if len(set(named.values())) > 1:
        said = " and ".join(f"'{name}' class '{value}'" for name, value in named.items())
        raise BadRequest(f"{said} differ; name one class", param=next(iter(named)))
    return named


def _target(headers: Mapping[str, str], name: str) -> float | None:
    if (told := headers.get(name)) is None:
        return None
    try:
        number = float(told)
    except ValueError:
        number = math.nan
    if not 1 <= number <= TARGET_MS_MAX:
        raise BadRequest(
            f"'{name}' must be a number of milliseconds from 1 to {TARGET_MS_MAX}; correct it",
            param=name,
        )
    return number
