"""Service class and targets of a request, from possibly contradictory fields and headers."""

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
LLMD_OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS = "x-gateway-inference-fairness-id"
LLMD_FAIRNESS = "x-llm-d-inference-fairness-id"


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
        ({}, {LLMD_OBJECTIVE: "batch"}, Service(ServiceClass.BATCH)),
        ({}, {OBJECTIVE: "batch", LLMD_OBJECTIVE: "batch"}, Service(ServiceClass.BATCH)),
        ({}, {FAIRNESS: "a"}, Service()),
        ({"slo": {"ttft_ms": 200, "tpot_ms": 50}}, {"x-slo-ttft-ms": "100"},
         Service(ttft_s=0.1, tpot_s=0.05)),
    ],
)  # fmt: skip
def test_service_fields_are_resolved(
    fields: dict[str, Any], headers: dict[str, str], service: Service
) -> None:
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
    ("classes", "message"),
    [
        ({"gold": {}}, "gold"),
        ({"interactive": {"ttft": 5}}, "did you mean 'ttft_ms'"),
        ({"interactive": {"ttft_ms": 0.5}}, "1 to 3600000"),
        ({"standard": {"token_group": 0}}, "token_group"),
        ({"standard": 500}, "must be a mapping"),
        ({"batch": {"ttft_ms": 500}}, "'batch' of 'classes' has no targets"),
    ],
)
def test_bad_classes_are_refused(classes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        class_targets(classes)


def test_the_tenant_is_part_of_the_service() -> None:
    assert POLICY.service_of(parse_chat(CHAT), {}, "alice") == Service(tenant="alice")


@pytest.mark.parametrize(
    ("fields", "headers", "sources"),
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
def test_contradictions_name_both_sources(
    fields: dict[str, Any], headers: dict[str, str], sources: tuple[str, str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        POLICY.service_of(parse_chat(CHAT | fields), headers)
    assert all(word in caught.value.message for word in sources)


@pytest.mark.parametrize("name", [FAIRNESS, LLMD_FAIRNESS])
def test_a_proxy_may_name_the_tenant_of_requests_without_an_owner(name: str) -> None:
    policy, body = ServicePolicy(fairness_header=True), parse_chat(CHAT)

    assert policy.service_of(body, {name: "a"}).tenant == "a"
    assert policy.service_of(body, {name: "a"}, "owner").tenant == "owner"
    assert policy.service_of(body, {}).tenant == ""


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({FAIRNESS: "a", LLMD_FAIRNESS: "b"}, "differ; send one"),
        ({FAIRNESS: "x" * 257}, "at most 256 printable"),
        ({LLMD_FAIRNESS: "a\x7f"}, "at most 256 printable"),
        ({OBJECTIVE: "batch", LLMD_OBJECTIVE: "standard"}, "differ; name a single class"),
        ({LLMD_OBJECTIVE: "gold"}, "'x-llm-d-inference-objective' must be one of"),
    ],
)
def test_contradictory_proxy_headers_are_refused(headers: dict[str, str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        ServicePolicy(fairness_header=True).service_of(parse_chat(CHAT), headers)


def test_requests_of_a_session_share_an_affinity() -> None:
    def affinity(fields: dict[str, Any], session: str = "", tenant: str = "") -> int:
        headers = {"x-session-id": session} if session else {}
        return POLICY.affinity_of(parse_chat(CHAT | fields), headers, tenant)

    key = affinity({"prompt_cache_key": "s"})
    assert 0 < key < 2**64
    assert key == affinity({"session_id": "s"}) == affinity({}, "s")
    assert key == affinity({"prompt_cache_key": "s", "session_id": "t"}, "u")
    assert key != affinity({"prompt_cache_key": "t"})
    assert key != affinity({"prompt_cache_key": "s"}, tenant="owner")
    # Values of other types have no effect, as other servers ignore the fields.
    assert affinity({}) == affinity({"session_id": 7}) == affinity({"prompt_cache_key": None}) == 0
    off = ServicePolicy(session_affinity=False)
    assert off.affinity_of(parse_chat(CHAT | {"session_id": "s"}), {}, "") == 0
