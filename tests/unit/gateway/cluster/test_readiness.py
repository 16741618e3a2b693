"""Readiness of a gateway: all workers at first, later a single serving group."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.gateway.cluster.readiness import GatewayReadiness, ReadinessProbe
from services.gateway.vocabulary.message import Heartbeat, ModelBeat
from tests.support.clock import Clock


@dataclass
class Cluster:
    """The gateway's view; `groups` of the scheduler is None while it does not respond."""

    model: str = "m"
    registered: int = 2
    in_groups: int = 2
    stable: int = 2
    groups: int | None = 2
    leaving: bool = False
    no_drops: dict[str, str] = field(default_factory=dict)

    def registered_workers(self) -> int:
        return self.registered

    def serving_workers(self) -> int:
        return self.in_groups

    def serving_groups(self) -> int:
        return self.stable

    def without_drops(self) -> dict[str, str]:
        return self.no_drops

    @property
    def heartbeat(self) -> Any:
        return None if self.groups is None else Heartbeat(self.groups, 0)


def probe(
    cluster: Cluster, expected: int | None = 2, clock: Clock | None = None, wait_s: float = 60.0
) -> ReadinessProbe:
    parts = (cast(Any, cluster) for _ in range(3))
    return ReadinessProbe(*parts, expected, wait_s, clock or Clock())


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
def test_all_workers_are_needed_at_first(fields: dict[str, Any], missing: str) -> None:
    cluster = Cluster(**fields)
    looked = probe(cluster).evaluate()
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
def test_after_the_start_a_single_serving_group_suffices(
    fields: dict[str, Any], ready: bool
) -> None:
    cluster = Cluster()
    ready_probe = probe(cluster)
    assert ready_probe.ready()
    for name, value in fields.items():
        setattr(cluster, name, value)
    assert ready_probe.ready() is ready


def test_a_missing_worker_is_waited_for_until_a_deadline() -> None:
    cluster, clock = Cluster(registered=1, in_groups=1, stable=0, groups=0), Clock()
    ready_probe = probe(cluster, clock=clock)
    assert not ready_probe.ready()
    clock.now_s += 1000  # no group serves: the time has not begun
    assert not ready_probe.ready()
    cluster.stable = cluster.groups = 1
    assert ready_probe.evaluate().missing == ("1 of 2 workers have registered",)
    clock.now_s += 59
    assert not ready_probe.ready()
    clock.now_s += 1
    assert ready_probe.ready()
    cluster.groups = 0
    assert ready_probe.evaluate().missing == ("the scheduler sees 0 of 1 groups serving",)


def test_a_gateway_that_expects_no_workers_is_ready_at_once() -> None:
    assert probe(Cluster(registered=1, in_groups=1, stable=1, groups=1), wait_s=0.0).ready()


async def test_complete_registration_is_noticed_without_probes() -> None:
    cluster = Cluster()
    ready_probe = probe(cluster)
    running = asyncio.ensure_future(ready_probe.run())
    await asyncio.sleep(0)
    cluster.registered = cluster.in_groups = cluster.stable = cluster.groups = 1
    assert ready_probe.ready()
    with contextlib.suppress(asyncio.CancelledError):
        running.cancel()
        await running


def test_workers_without_drops_have_reasons_and_count_as_ready() -> None:
    state = probe(Cluster(no_drops={"w0": "UCX cannot be loaded"})).evaluate()
    assert state.ready and state.without_drops == {"w0": "UCX cannot be loaded"}


@pytest.mark.parametrize("needs_all", [False, True])
def test_a_gateway_is_ready_once_any_or_all_models_are(needs_all: bool) -> None:
    there, away = Cluster(), Cluster(stable=0, in_groups=0, registered=1)
    probes = {"m": probe(there), "n": probe(away)}
    gateway = GatewayReadiness(probes, cast(Any, there), needs_all=needs_all)
    state = gateway.evaluate()
    assert state.ready is gateway.ready() is not needs_all
    assert (state.workers_expected, state.workers_registered, state.groups_serving) == (4, 3, 2)
    wanted = "1 of 2 workers have registered", "no group of the model is stable"
    assert state.missing == (wanted if needs_all else ())
    assert gateway.model_ready("m") and not gateway.model_ready("n")
    assert not gateway.model_ready("unknown") and gateway.of("unknown") is None
    assert gateway.healthy() and gateway.groups_serving("n") == 0
    there.stable = there.groups = 0
    assert not gateway.ready() and not gateway.healthy()


def test_a_scheduler_that_sees_groups_of_another_model_only() -> None:
    cluster = Cluster()
    beat = Heartbeat(2, 0, models={"n": ModelBeat(2, 0)})
    admission = SimpleNamespace(heartbeat=beat)
    ready_probe = ReadinessProbe(
        cast(Any, cluster), cast(Any, admission), cast(Any, cluster), None, 60.0
    )
    assert ready_probe.evaluate().missing == ("the scheduler sees 0 of 1 groups serving",)
