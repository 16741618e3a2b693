"""When a gateway says that it is ready: at first once all is there, later while it can serve."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.gateway.cluster.readiness import ReadinessProbe


@dataclass
class Cluster:
    """What the gateway knows; `groups` of the scheduler is None while it does not answer."""

    registered: int = 2
    in_groups: int = 2
    stable: int = 2
    groups: int | None = 2
    leaving: bool = False

    def registered_workers(self) -> int:
        return self.registered

    def serving_workers(self) -> int:
        return self.in_groups

    def serving_groups(self) -> int:
        return self.stable

    @property
    def heartbeat(self) -> Any:
        return None if self.groups is None else SimpleNamespace(groups_serving=self.groups)


def probe(cluster: Cluster, expected: int | None = 2) -> ReadinessProbe:
    return ReadinessProbe(*(cast(Any, cluster) for _ in range(3)), expected)


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"registered": 1, "in_groups": 1}, "1 of 2 workers have registered"),
        ({"in_groups": 1}, "1 of 2 workers are in a stable group"),
        ({"groups": 1}, "the scheduler sees 1 of 2 groups serving"),
        ({"groups": None}, "the scheduler does not answer"),
        ({"stable": 0}, "no group of the model is stable"),
        ({"leaving": True}, "this gateway is shutting down"),
    ],
)
def test_at_first_everything_has_to_be_there(fields: dict[str, Any], missing: str) -> None:
    cluster = Cluster(**fields)
    looked = probe(cluster).look()
    assert looked.missing == (missing,) and not looked.ready
    assert probe(Cluster()).ready()


@pytest.mark.parametrize(
    ("fields", "ready"),
    [
        ({"registered": 1, "in_groups": 1, "stable": 1, "groups": 1}, True),
        ({"registered": 1, "in_groups": 1, "stable": 2, "groups": 1}, True),
        ({"registered": 0, "in_groups": 0, "stable": 0, "groups": 0}, False),
        ({"groups": 0}, False),
        ({"groups": None}, False),
        ({"leaving": True}, False),
    ],
)
def test_later_it_is_ready_while_a_group_serves(fields: dict[str, Any], ready: bool) -> None:
    cluster = Cluster()
    one = probe(cluster)
    assert one.ready()
    for name, value in fields.items():
        setattr(cluster, name, value)
    assert one.ready() is ready
