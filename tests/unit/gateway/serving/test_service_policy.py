"""What a request is promised, from fields and headers that may contradict each other."""

from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.core.service import Service, ServiceClass
from services.gateway.api.chat import parse_chat
from services.gateway.serving.service_policy import ServicePolicy
from services.gateway.vocabulary.class_targets import class_targets
from services.gateway.vocabulary.errors import BadRequest
from tests.support.bad_inputs import CHAT

OBJECTIVE = "x-gateway-inference-objective"


INTERACTIVE = Service(ServiceClass.INTERACTIVE, ttft_s=0.5, tpot_s=0.1)
POLICY = ServicePolicy()
CONFIGURED = ServicePolicy(
    class_targets(
        {
            "interactive": {"ttft_ms": 300},
            "standard": {"ttft_ms": 2000, "tpot_ms": 200, "token_group": 4},
        }
    ),
    ServiceClass.BATCH,
)


@pytest.mark.parametrize(
    ("fields", "headers", "service"),
    [
        ({}, {}, Service()),
        ({"service_tier": "scale", "priority": 0}, {}, Service()),
        ({"service_tier": "auto", "slo_class": "batch"}, {}, Service(ServiceClass.BATCH)),
        ({"priority": -2, "service_tier": "priority"}, {OBJECTIVE: "interactive"},
         replace(INTERACTIVE, rank=-2)),
        ({"slo_class": "interactive", "slo": {"tpot_ms": 50}}, {},
         replace(INTERACTIVE, tpot_s=0.05)),
        ({"priority": 5}, {}, Service(ServiceClass.BATCH, rank=5)),
        ({"slo": {"ttft_ms": 200, "tpot_ms": 50}}, {"x-slo-ttft-ms": "100"},
         Service(ttft_s=0.1, tpot_s=0.05)),
    ],
)  # fmt: skip
def test_promises(fields: dict[str, Any], headers: dict[str, str], service: Service) -> None:
    assert POLICY.service_of(parse_chat(CHAT | fields), headers) == service


@pytest.mark.parametrize(
    ("fields", "service"),
    [
        ({}, Service(ServiceClass.BATCH)),
        ({"service_tier": "auto"}, Service(ServiceClass.BATCH)),
        ({"service_tier": "default"}, Service(ttft_s=2.0, tpot_s=0.2, token_group=4)),
        ({"slo": {"ttft_ms": 100}}, Service(ttft_s=0.1, tpot_s=0.2, token_group=4)),
        ({"priority": -1}, Service(ServiceClass.INTERACTIVE, ttft_s=0.3, rank=-1)),
    ],
)
def test_targets_and_default_class_are_as_configured(
    fields: dict[str, Any], service: Service
) -> None:
    assert CONFIGURED.service_of(parse_chat(CHAT | fields), {}) == service


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ({"gold": {}}, "gold"),
        ({"interactive": {"ttft": 5}}, "did you mean 'ttft_ms'"),
        ({"interactive": {"ttft_ms": 0.5}}, "1 to 3600000"),
        ({"standard": {"token_group": 0}}, "token_group"),
        ({"standard": 500}, "must be a mapping"),
        ({"batch": {"ttft_ms": 500}}, "'batch' of 'classes' has no targets"),
    ],
)
def test_bad_classes_are_refused(classes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        class_targets(classes)


def test_a_tenant_stands_in_the_promise() -> None:
    assert POLICY.service_of(parse_chat(CHAT), {}, "alice") == Service(tenant="alice")


@pytest.mark.parametrize(
    ("fields", "headers", "words"),
    [
        ({"service_tier": "flex", "priority": -1}, {}, ("service_tier", "priority")),
        ({"service_tier": "default", "slo_class": "batch"}, {}, ("service_tier", "slo_class")),
        ({"slo_class": "standard", "priority": -1}, {}, ("slo_class", "priority")),
        ({"slo_class": "batch"}, {OBJECTIVE: "standard"}, ("slo_class", OBJECTIVE)),
        (
            {"slo_class": "batch", "slo": {"tpot_ms": 5}},
            {},
            ("'slo_class' puts", "remove 'slo' or"),
        ),
        ({"priority": 1}, {"x-slo-ttft-ms": "5"}, ("'priority' puts", "'x-slo-ttft-ms' or")),
        ({}, {OBJECTIVE: "gold"}, (OBJECTIVE, "interactive")),
        ({}, {"x-slo-tpot-ms": "0.5"}, ("x-slo-tpot-ms", "milliseconds")),
        ({}, {"x-slo-tpot-ms": "nan"}, ("x-slo-tpot-ms", "milliseconds")),
    ],
)
def test_contradictions_name_both_places(
    fields: dict[str, Any], headers: dict[str, str], words: tuple[str, str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        POLICY.service_of(parse_chat(CHAT | fields), headers)
    assert all(word in caught.value.message for word in words)
