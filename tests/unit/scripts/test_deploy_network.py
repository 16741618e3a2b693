"""Network policies are compared with the calls that the code makes."""

import pytest
from deploy_network import (
    SERVICES,
    Connection,
    admits_strangers,
    calls,
    check_connections,
    selects,
    sources_of_services,
)

COMPONENT = "app.kubernetes.io/component"


def pods(*names):
    return {"matchExpressions": [{"key": COMPONENT, "operator": "In", "values": list(names)}]}


def policy(component, **rules):
    return {"spec": {"podSelector": pods(component), **rules}}


WAY = Connection("gateway", "worker", 50051, 50051)
IN = policy(
    "worker", ingress=[{"from": [{"podSelector": pods("gateway")}], "ports": [{"port": 50051}]}]
)
OUT = policy(
    "gateway", egress=[{"to": [{"podSelector": pods("worker")}], "ports": [{"port": 50051}]}]
)


def test_a_connection_needs_both_policies():
    assert list(check_connections([WAY], [IN, OUT])) == []
    assert list(check_connections([WAY], [IN])) == [
        "no NetworkPolicy allows egress from gateway to worker at 50051"
    ]
    assert list(check_connections([WAY], [OUT])) == [
        "no NetworkPolicy allows ingress from gateway to worker at 50051"
    ]


@pytest.mark.parametrize(
    "way",
    [Connection("memmgr", "worker", 50051, 50051), Connection("gateway", "worker", 50051, 50052)],
)
def test_other_sources_and_ports_are_closed(way):
    assert len(list(check_connections([way], [IN, OUT]))) == 2


def test_a_port_range_must_be_covered_completely():
    lanes = [{"port": 50061, "endPort": 50094}]
    both = policy(
        "worker",
        ingress=[{"from": [{"podSelector": pods("worker")}], "ports": lanes}],
        egress=[{"to": [{"podSelector": pods("worker")}], "ports": lanes}],
    )
    assert list(check_connections([Connection("worker", "worker", 50063, 50094)], [both])) == []
    assert len(list(check_connections([Connection("worker", "worker", 50063, 50095)], [both]))) == 2


def test_an_empty_source_list_allows_any_source():
    assert not admits_strangers([IN], "worker", 50051)
    assert admits_strangers([policy("worker", ingress=[{}])], "worker", 50051)
    everywhere = {"from": [{"namespaceSelector": {}}], "ports": [{"port": 50051}]}
    assert admits_strangers([policy("worker", ingress=[everywhere])], "worker", 50051)
    assert not admits_strangers([policy("worker", ingress=[everywhere])], "worker", 50052)


def test_selectors_match_their_pods():
    assert selects(pods("gateway", "worker"), "worker")
    assert not selects(pods("gateway"), "worker")
    assert selects({"matchLabels": {"app.kubernetes.io/part-of": "tideserve"}}, "memmgr")
    assert not selects({"matchLabels": {"app": "other"}}, "memmgr")


def test_calls_are_derived_from_grpc_stubs():
    text = "stub = worker_pb2_grpc.MemberServiceStub(channel)"
    assert calls({"memmgr": text}) == {("memmgr", "worker")}
    every = calls({"gateway": "process_pb2_grpc.ProcessServiceStub(channel)"})
    assert every == {("gateway", service) for service in SERVICES}


def test_calls_of_each_service_are_found_in_the_code():
    assert {source for source, _ in calls(sources_of_services())} == set(SERVICES)
