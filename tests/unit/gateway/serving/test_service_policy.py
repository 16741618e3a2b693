"""What a request is promised, from fields and headers that may contradict each other."""

from typing import Any

import pytest

from services.core.service import Service, ServiceClass
from services.gateway.api.chat import parse_chat
from services.gateway.serving.service_policy import service_of, warnings_of
from services.gateway.vocabulary.errors import BadRequest
from tests.support.bad_inputs import CHAT

OBJECTIVE = "x-gateway-inference-objective"


@pytest.mark.parametrize(
    ("fields", "headers", "service"),
    [
        ({}, {}, Service()),
        ({"service_tier": "scale", "priority": 0}, {}, Service()),
        ({"priority": -2, "service_tier": "priority"}, {OBJECTIVE: "interactive"},
         Service(ServiceClass.INTERACTIVE, rank=-2)),
        ({"priority": 5}, {}, Service(ServiceClass.BATCH, rank=5)),
        ({"slo": {"ttft_ms": 200, "tpot_ms": 50}}, {"x-slo-ttft-ms": "100"},
         Service(ttft_s=0.1, tpot_s=0.05)),
    ],
)  # fmt: skip
def test_promises(fields: dict[str, Any], headers: dict[str, str], service: Service) -> None:
    assert service_of(parse_chat(CHAT | fields), headers) == service
    warnings = warnings_of(service, parse_chat(CHAT | fields), headers)
    assert bool(warnings) == (service != Service())
    for name in (*fields, *headers):
        assert all(f"'{name}'" in warning for warning in warnings)


def test_a_tenant_alone_is_no_promise() -> None:
    service = service_of(parse_chat(CHAT), {}, "alice")
    assert service == Service(tenant="alice")
    assert warnings_of(service, parse_chat(CHAT), {}) == ()


@pytest.mark.parametrize(
    ("fields", "headers", "words"),
    [
        ({"service_tier": "flex", "priority": -1}, {}, ("service_tier", "priority")),
        ({"slo_class": "standard", "priority": -1}, {}, ("slo_class", "priority")),
        ({"slo_class": "batch"}, {OBJECTIVE: "standard"}, ("slo_class", OBJECTIVE)),
        ({"slo_class": "batch", "slo": {"tpot_ms": 5}}, {}, ("batch", "targets")),
        ({"priority": 1}, {"x-slo-ttft-ms": "5"}, ("batch", "targets")),
        ({}, {OBJECTIVE: "gold"}, (OBJECTIVE, "interactive")),
        ({}, {"x-slo-tpot-ms": "0.5"}, ("x-slo-tpot-ms", "milliseconds")),
        ({}, {"x-slo-tpot-ms": "nan"}, ("x-slo-tpot-ms", "milliseconds")),
    ],
)
def test_contradictions_name_both_places(
    fields: dict[str, Any], headers: dict[str, str], words: tuple[str, str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        service_of(parse_chat(CHAT | fields), headers)
    assert all(word in caught.value.message for word in words)
