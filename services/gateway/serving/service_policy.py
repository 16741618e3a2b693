"""What a request is promised: from a body's fields and the headers that gateways know."""

import math
from collections.abc import Mapping

from services.core.service import Service, ServiceClass
from services.gateway.api.generation import TARGET_MS_MAX, GenerationRequest
from services.gateway.vocabulary.errors import BadRequest

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
OBJECTIVE_HEADER = "x-gateway-inference-objective"
PROMISE_HEADERS = (TTFT_HEADER, TPOT_HEADER, OBJECTIVE_HEADER)
"""Headers, and names of gRPC metadata, that say the same as the fields `slo` and `slo_class`."""

_TIERS = {"priority": ServiceClass.INTERACTIVE, "flex": ServiceClass.BATCH}
_FIELDS = ("priority", "service_tier", "slo_class", "slo")


def service_of(body: GenerationRequest, headers: Mapping[str, str], tenant: str = "") -> Service:
    """The promise of a request; `headers` by the names of `HEADERS`.

    Raises:
        BadRequest: if two places name different classes, or a target is none.
    """
    service_class = _class(body, headers)
    slo = body.slo
    ttft_ms = _target(headers, TTFT_HEADER) or (slo.ttft_ms if slo is not None else None)
    tpot_ms = _target(headers, TPOT_HEADER) or (slo.tpot_ms if slo is not None else None)
    if service_class is ServiceClass.BATCH and (ttft_ms is not None or tpot_ms is not None):
        raise BadRequest(
            "requests of class 'batch' have no targets; leave 'slo' or the class out", param="slo"
        )
    return Service(
        service_class=service_class,
        ttft_s=None if ttft_ms is None else ttft_ms / 1000,
        tpot_s=None if tpot_ms is None else tpot_ms / 1000,
        rank=body.priority or 0,
        tenant=tenant,
    )


def warnings_of(
    service: Service, body: GenerationRequest, headers: Mapping[str, str]
) -> tuple[str, ...]:
    """What the client should know of its promise `service`, which body and headers ask for.

    ASCII sentences.
    """
    if service == Service(tenant=service.tenant):
        return ()
    names = [name for name in _FIELDS if getattr(body, name) is not None]
    told = ", ".join(
        f"'{name}'" for name in (*names, *(n for n in PROMISE_HEADERS if n in headers))
    )
    return (
        "targets have no effect yet, and classes only where the operator has set scheduling to"
        f" priority: {told}",
    )


def _class(body: GenerationRequest, headers: Mapping[str, str]) -> ServiceClass:
    """The class of the request; raises BadRequest if two places name different ones."""
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
    return next(iter(named.values()), ServiceClass.STANDARD)


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
