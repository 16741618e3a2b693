"""Metrics of a scheduler as leader and as standby."""

import itertools
from dataclasses import replace

from services.core.scheduler.buckets import Bucketing
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import Asked, GroupJoined, ServingGroup, Ticked
from services.core.service import Service, ServiceClass
from services.scheduler.metrics import SchedulerCollector
from tests.support.exposition import Samples, collected, value

GROUP = ServingGroup("g", 1, "w", "i", "h:1", "m", 10, 16, 100)


def asked(request_id: str, model: str, tokens: int = 8) -> Asked:
    return Asked(request_id, model, tokens, 1, now_s=1.0, stream_id=1)


def exported(state: SchedulerState, leads: bool) -> Samples:
    return collected(SchedulerCollector(lambda: state.snapshot(3.0), lambda: leads))


def waiting(samples: Samples) -> dict[str, float]:
    name = "vllm:num_requests_waiting"
    return {
        dict(labels)["model_name"]: count for (n, labels), count in samples.items() if n == name
    }


def test_the_leader_exports_its_queue_by_model() -> None:
    state = SchedulerState(8, 120.0)
    state.handle(GroupJoined(0.0, GROUP))
    state.handle(asked("secret-id", "m"))
    state.handle(asked("another", "m"))
    state.handle(asked("bad", "m", tokens=0))
    samples = exported(state, leads=True)
    assert value(samples, "tideserve_scheduler_leader") == 1
    assert value(samples, "tideserve_scheduler_queued_requests") == 2
    assert value(samples, "tideserve_scheduler_oldest_wait_seconds") == 2
    assert value(samples, "tideserve_scheduler_queue_deadline_seconds") == 120
    assert value(samples, "tideserve_scheduler_refused_requests_total", reason="invalid") == 1
    name = "tideserve_scheduler_class_refused_requests_total"
    assert value(samples, name, **{"class": "standard"}) == 1
    assert value(samples, "tideserve_scheduler_class_queued_requests", **{"class": "standard"}) == 2
    name = "tideserve_scheduler_class_oldest_wait_seconds"
    assert value(samples, name, **{"class": "standard"}) == 2
    assert value(samples, name, **{"class": "batch"}) == 0
    assert value(samples, "tideserve_scheduler_returned_requests_total") == 0
    assert value(samples, "tideserve_scheduler_groups_known") == 1
    assert value(samples, "vllm:num_requests_waiting", model_name="m", engine="queue") == 2
    assert "secret-id" not in str(samples)


def test_a_served_model_exports_an_empty_queue() -> None:
    state = SchedulerState(8, 120.0)
    assert waiting(exported(state, leads=True)) == {}
    state.handle(GroupJoined(0.0, GROUP))
    assert waiting(exported(state, leads=True)) == {"m": 0}


def test_sums_over_leader_and_standby_count_once() -> None:
    leader, standby = SchedulerState(8, 120.0), SchedulerState(8, 120.0)
    for state in (leader, standby):
        state.handle(GroupJoined(0.0, GROUP))
    leader.handle(asked("r", "m"))
    both = [exported(leader, leads=True), exported(standby, leads=False)]
    names = {name for name, _ in itertools.chain(*both)}
    summed = {
        name: sum(v for samples in both for (n, _), v in samples.items() if n == name)
        for name in names
    }
    assert summed["vllm:num_requests_waiting"] == 1
    assert summed["tideserve_scheduler_queued_requests"] == 1
    assert summed["tideserve_scheduler_groups_known"] == 1
    assert summed["tideserve_scheduler_leader"] == 1
    assert waiting(both[1]) == {}


def test_buckets_are_exported_while_requests_wait() -> None:
    state = SchedulerState(200, 120.0, rules=ClassRules(buckets=Bucketing.ON))
    state.handle(GroupJoined(0.0, replace(GROUP, max_model_len=4096, capacity_blocks=300)))
    assert "tideserve_scheduler_buckets" not in str(exported(state, leads=True))
    batch = Service(ServiceClass.BATCH)
    for number in range(100):
        tokens = (100, 2000)[number % 2]
        state.handle(replace(asked(f"r{number}", "m", tokens), service=batch, max_tokens=2))
    state.handle(Ticked(1.0))
    samples = exported(state, leads=True)
    assert value(samples, "tideserve_scheduler_buckets", model_name="m") == 2
    assert value(samples, "tideserve_scheduler_bucket_padding_share", model_name="m") == 0
    assert value(samples, "tideserve_scheduler_bucket_mean_tokens", model_name="m") == 1051
    assert value(samples, "tideserve_scheduler_bucket_arrivals_per_second", model_name="m") == 10
