"""Check that the network policies allow the connections between services, and no others.

The connections are read from the code: the stubs that the sources of a service create.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deploy_objects import ROOT, Object

SERVICES = ("gateway", "scheduler", "memmgr", "worker")
STUB = re.compile(r"\b(\w+)_pb2_grpc\.\w+Stub\(")
# Every service serves it, and a caller may call any of them.
EVERYWHERE = "process"
# Services whose instances call each other, by the contract's file.
PEERS = {"peer": "gateway"}


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection from pods of a component to a range of ports of another component."""

    source: str
    target: str
    first: int
    last: int


def calls(sources: Mapping[str, str]) -> set[tuple[str, str]]:
    """(caller, callee) pairs, from the source code of each service."""
    pairs = set()
    for service, text in sources.items():
        for called in STUB.findall(text):
            targets = SERVICES if called == EVERYWHERE else (PEERS.get(called, called),)
            pairs |= {(service, target) for target in targets}
    return pairs


def sources_of_services() -> dict[str, str]:
    """All Python code of each service."""
    return {
        service: "\n".join(
            path.read_text() for path in sorted((ROOT / "services" / service).rglob("*.py"))
        )
        for service in SERVICES
    }


def check_connections(wanted: Iterable[Connection], policies: Iterable[Object]) -> Iterator[str]:
    """A sentence per connection in `wanted` that `policies` block at an end."""
    policies = list(policies)
    for connection in wanted:
        for end in ("ingress", "egress"):
            if not any(_opens(policy, connection, end) for policy in policies):
                ports = (
                    f"{connection.first}"
                    if connection.first == connection.last
                    else f"{connection.first}-{connection.last}"
                )
                yield (
                    f"no NetworkPolicy allows {end} from {connection.source} to {connection.target}"
                    f" at {ports}"
                )


def admits_strangers(policies: Iterable[Object], component: str, port: int) -> bool:
    """Whether foreign pods may connect to `port` of `component`."""
    return any(
        selects(policy["spec"]["podSelector"], component) and _covers(rule, port, port)
        for policy in policies
        for rule in policy["spec"].get("ingress", ())
        if "from" not in rule or any(peer.get("namespaceSelector") == {} for peer in rule["from"])
    )


def selects(selector: Object, component: str) -> bool:
    """Whether `selector` matches the pods of `component`."""
    labels = {
        "app.kubernetes.io/name": "tideserve",
        "app.kubernetes.io/part-of": "tideserve",
        "app.kubernetes.io/component": component,
    }
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
        labels.get(row["key"]) in row["values"] for row in selector.get("matchExpressions", ())
    )


def _opens(policy: Object, connection: Connection, end: str) -> bool:
    inside, outside = (
        (connection.target, connection.source)
        if end == "ingress"
        else (connection.source, connection.target)
    )
    if not selects(policy["spec"]["podSelector"], inside):
        return False
    direction = "from" if end == "ingress" else "to"
    return any(
        _covers(rule, connection.first, connection.last)
        and (
            direction not in rule
            or any(selects(peer.get("podSelector", {}), outside) for peer in rule[direction])
        )
        for rule in policy["spec"].get(end, ())
    )


def _covers(rule: Object, first: int, last: int) -> bool:
    ports = rule.get("ports")
    return ports is None or any(
        row["port"] <= first and last <= row.get("endPort", row["port"]) for row in ports
    )
