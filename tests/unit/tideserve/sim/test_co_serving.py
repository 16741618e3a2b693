"""Batch work beside online requests in the simulated cluster: figures by class, and waiting."""

import random
from collections import Counter
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest

from services.core.cost.model import CostModel
from services.core.planner.config import IterationConfig
from services.core.planner.preemption import Preempt, PreemptedWork
from services.core.queue_order import Scheduling
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.state_config import StateConfig
from services.core.service import Service, ServiceClass
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcome, figures
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.token_times import percentiles_of
from tideserve.sim.workload import Arrival, ClosedLoop, CoServed, OpenLoop, gamma_times

DEVICE = CostTimeModel(CostModel(alpha=1e-8, beta=1e-4, gamma=0.02, lam=0.0195))
INTERACTIVE = Service(ServiceClass.INTERACTIVE, ttft_s=0.5, tpot_s=0.07)
BATCH = Service(ServiceClass.BATCH)
WINDOW_S = 4.0


def load(seed: int, clients: int, duration_s: float = 30.0, batch: Service = BATCH) -> CoServed:
    times_s = gamma_times(2.0, 1.0, duration_s, random.Random(seed))
    online = OpenLoop([Arrival(time_s, 300, 20, service=INTERACTIVE) for time_s in times_s])
    backlog = ClosedLoop(repeat(Arrival(0.0, 700, 30, service=batch)), clients)
    return CoServed(online, backlog, WINDOW_S)


def spec(scheduling: str, **changes: Any) -> ClusterSpec:
    iteration = IterationConfig(
        16, 2000, 512, 64, 1000, cost_model=DEVICE.model, scheduling=Scheduling(scheduling)
    )
    scheduler = StateConfig(
        queue_deadline_s=3600.0, lateness=0.0, rules=ClassRules(Scheduling(scheduling))
    )
    return ClusterSpec(2, replace(iteration, **changes), 8192, scheduler)


def run(scheduling: str, workload: CoServed, **changes: Any) -> dict[str, Any]:
    return figures(Cluster(spec(scheduling, **changes), DEVICE, workload).run())


def test_the_same_seed_gives_the_same_figures_by_class() -> None:
    first, same, other = (run("slo", load(seed, 8)) for seed in (1, 1, 2))
    assert first == same
    assert first["classes"]["online"]["ttft_s"] != other["classes"]["online"]["ttft_s"]


@pytest.mark.parametrize("scheduling", ["fcfs", "priority", "slo"])
def test_every_event_keeps_the_invariants_and_every_online_request_ends(scheduling: str) -> None:
    workload = load(3, 12, duration_s=8.0)
    cluster = Cluster(spec(scheduling, num_blocks=160), DEVICE, workload)

    def check() -> None:
        cluster.check_invariants()
        for instance in cluster.instances.values():
            instance.state.check_invariants()

    outcomes = cluster.run(check=check)
    ended = Counter(record.outcome for record in outcomes.records)
    online = [r for r in outcomes.records if r.service_class is ServiceClass.INTERACTIVE]
    assert len(online) == len(workload.online.arrivals)
    assert all(record.outcome is Outcome.COMPLETED for record in online)
    # The clients of the backlog always wait for an answer; one may just hear that it has ended.
    clients = workload.batch.concurrency
    assert ended[Outcome.RUNNING] in (clients - 1, clients)
    assert max(r.end_s for r in online) == pytest.approx(outcomes.simulated_s, abs=0.01)


def test_processed_tokens_are_those_of_the_window_by_class() -> None:
    workload = load(5, 0)
    result = run("slo", workload)
    begin_s, end_s = workload.window_s
    assert begin_s == WINDOW_S and end_s == workload.online.arrivals[-1].arrival_s
    inside = [arrival for arrival in workload.online.arrivals if begin_s <= arrival.arrival_s]
    online = result["classes"]["online"]
    assert online["sent"] == online["completed"] == len(inside) < len(workload.online.arrivals)
    tokens = online["processed_tokens_per_s"] * result["window_s"]
    # All but what runs across the ends of the window: a few requests.
    assert tokens == pytest.approx(320 * len(inside), abs=320 * 4)
    assert result["processed_tokens_per_s"] == online["processed_tokens_per_s"]
    assert result["classes"]["batch"]["processed_tokens_per_s"] == 0
    assert result["recomputed_share"] == 0


def test_gaps_are_the_times_between_the_tokens_of_each_request() -> None:
    alone = run("slo", CoServed(OpenLoop([Arrival(1.0, 300, 20, service=INTERACTIVE)]), NOBODY))
    gaps = alone["classes"]["online"]["inter_token_s"]
    assert gaps["p50"] == pytest.approx(DEVICE.decodes_s(1, 310, 1), rel=0.01)
    assert percentiles_of(Counter({0.1: 98, 5.0: 2}), {"p50": 0.5, "p99": 0.99}) == {
        "p50": 0.1,
        "p99": 5.0,
    }
    assert percentiles_of(Counter(), {"p50": 0.5}) == {"p50": None}


NOBODY = ClosedLoop(iter(()), 0)


def test_classes_decide_in_the_scheduler_and_in_the_workers() -> None:
    results = {name: run(name, load(7, 60)) for name in ("fcfs", "priority", "slo")}
    alone = run("slo", load(7, 0))["classes"]["online"]
    online = {name: result["classes"]["online"] for name, result in results.items()}
    batch = {
        name: result["classes"]["batch"]["processed_tokens_per_s"]
        for name, result in results.items()
    }
    assert min(batch.values()) > 2 * alone["processed_tokens_per_s"]
    assert online["fcfs"]["ttft_s"]["p99"] > 4 * online["priority"]["ttft_s"]["p99"]
    assert online["slo"]["inter_token_s"]["p50"] < 0.8 * online["priority"]["inter_token_s"]["p50"]
    assert INTERACTIVE.tpot_s is not None
    assert online["slo"]["ttft_s"]["p99"] < alone["ttft_s"]["p99"] + 2 * INTERACTIVE.tpot_s


def test_groups_can_be_reserved_for_batch_work() -> None:
    workload = load(8, 8)
    rules = ClassRules(Scheduling.PRIORITY, batch_groups=1)
    plain = spec("priority")
    scheduler = replace(plain.scheduler, rules=rules)
    cluster = Cluster(replace(plain, scheduler=scheduler), DEVICE, workload)
    places = _places(cluster)
    assert places[ServiceClass.BATCH] == {"worker-0000"}
    assert places[ServiceClass.INTERACTIVE] == {"worker-0001"}


def _places(cluster: Cluster) -> dict[ServiceClass, set[str]]:
    workers: dict[ServiceClass, set[str]] = {}
    for record in cluster.run().records:
        if record.worker_id:
            workers.setdefault(record.service_class, set()).add(record.worker_id)
    return workers


@pytest.mark.parametrize("work", list(PreemptedWork))
def test_an_online_request_interrupts_batch_work_at_the_next_safepoint(work: PreemptedWork) -> None:
    times_s = [1.0 + 3.0 * number for number in range(8)]
    untargeted = Service(ServiceClass.INTERACTIVE)
    online = OpenLoop([Arrival(time_s, 300, 1, service=untargeted) for time_s in times_s])
    backlog = repeat(Arrival(0.0, 4000, 2, service=BATCH))
    large = {"max_batch_tokens": 8192, "offline_iteration_s": 2.0, "online_chunk_tokens": 300}
    waits_s, batch = {}, {}
    for preempt in (Preempt.OFF, Preempt.ALWAYS):
        workload = CoServed(online, ClosedLoop(backlog, 8))
        changes: dict[str, Any] = large | {"preempt": preempt, "preempted_work": work}
        cluster = Cluster(spec("slo", **changes), DEVICE, workload)
        result = figures(cluster.run(check=cluster.check_invariants))
        waits_s[preempt] = result["classes"]["online"]["ttft_s"]
        batch[preempt] = result["classes"]["batch"]["processed_tokens_per_s"]
        states = [instance.state for instance in cluster.instances.values()]
        interrupted = sum(state.preempted_iterations_total for state in states)
        dropped = sum(state.sequence_table.discarded_tokens_total for state in states)
        resumes = work is PreemptedWork.RESUME
        assert (interrupted > 0) == (preempt is Preempt.ALWAYS)
        assert (dropped > 0) == (preempt is Preempt.ALWAYS and not resumes)
    # Some of 300 prompt tokens take 50 ms, a batch iteration nearly a second.
    assert waits_s[Preempt.OFF]["p99"] > 0.5
    assert waits_s[Preempt.ALWAYS]["p99"] < 0.15
    kept = batch[Preempt.ALWAYS] / batch[Preempt.OFF]
    assert kept > 0.9 if work is PreemptedWork.RESUME else kept > 0.6


def test_a_group_change_interrupts_batch_work_at_the_next_safepoint() -> None:
    longest_s = {}
    for preempt in (Preempt.OFF, Preempt.ALWAYS):
        online = OpenLoop([Arrival(8.0, 300, 1, service=INTERACTIVE)])
        workload = CoServed(online, ClosedLoop(repeat(Arrival(0.0, 4000, 2, service=BATCH)), 8))
        large = spec("slo", max_batch_tokens=8192, preempt=preempt)
        cluster = Cluster(large, DEVICE, workload)
        simulation, instance = cluster._simulation, next(iter(cluster.instances.values()))
        waited_s: list[float] = []

        def hear(sent_s: float, now: Any = simulation, waits: list[float] = waited_s) -> None:
            waits.append(now.now_s - sent_s)

        for number in range(12):
            sent_s = 1.0 + 0.47 * number
            simulation.at(sent_s, instance.post, hear, sent_s)
        cluster.run(check=cluster.check_invariants)
        assert len(waited_s) == 12
        longest_s[preempt] = max(waited_s)
    assert longest_s[Preempt.OFF] > 0.3
    assert longest_s[Preempt.ALWAYS] < 0.1


def test_a_request_with_slack_interrupts_nothing() -> None:
    patient = Service(ServiceClass.INTERACTIVE, ttft_s=60.0)
    online = OpenLoop([Arrival(0.7 * number, 300, 1, service=patient) for number in range(40)])
    workload = CoServed(online, ClosedLoop(repeat(Arrival(0.0, 4000, 2, service=BATCH)), 8))
    cluster = Cluster(
        spec("slo", max_batch_tokens=8192, preempt=Preempt.DEADLINE), DEVICE, workload
    )
    outcomes = cluster.run()
    online_records = [r for r in outcomes.records if r.service_class is not ServiceClass.BATCH]
    assert all(record.outcome is Outcome.COMPLETED for record in online_records)
    assert not any(
        instance.state.preempted_iterations_total for instance in cluster.instances.values()
    )


def test_a_higher_fill_level_speeds_up_batch_work_and_delays_online_tokens() -> None:
    results = [run("slo", load(9, 60), harvest=fill) for fill in (0.1, 0.5, 1.0)]
    tokens = [result["classes"]["batch"]["processed_tokens_per_s"] for result in results]
    gaps_s = [result["classes"]["online"]["inter_token_s"]["p50"] for result in results]
    assert tokens == sorted(tokens) and tokens[0] < 0.8 * tokens[2]
    assert gaps_s == sorted(gaps_s) and gaps_s[0] < 0.7 * gaps_s[2]


def test_attainment_covers_requests_of_the_window() -> None:
    grouped = replace(INTERACTIVE, token_group=4)
    workload = load(11, 60)
    online = OpenLoop([arrival._replace(service=grouped) for arrival in workload.online.arrivals])
    workload = replace(workload, online=online)
    results = {name: run(name, workload)["classes"] for name in ("fcfs", "slo")}
    kept = {name: result["online"]["slo_attainment"] for name, result in results.items()}
    assert kept["fcfs"]["ttft"] < 0.2 < 0.95 < kept["slo"]["ttft"]
    assert kept["slo"]["token_group"] > 0.95
    good = results["slo"]["online"]["goodput_requests_per_s"]
    window_s = workload.window_s[1] - workload.window_s[0]
    assert good <= results["slo"]["online"]["sent"] / window_s
    assert good > 5 * results["fcfs"]["online"]["goodput_requests_per_s"]


def test_batch_requests_a_second_are_those_that_end_in_the_window() -> None:
    cluster = Cluster(spec("priority"), DEVICE, load(12, 20))
    outcomes = cluster.run()
    (begin_s, _), (end_s, _) = outcomes.tokens
    ended = [r for r in outcomes.records if not r.service.online and begin_s <= r.end_s <= end_s]
    batch = figures(outcomes)["classes"]["batch"]
    assert 0 < len(ended) < batch["completed"]
    assert batch["throughput_requests_per_s"] == pytest.approx(len(ended) / (end_s - begin_s))


def test_a_batch_is_sent_when_its_predecessor_has_ended() -> None:
    workload = load(13, 6)
    together = replace(workload, batch=replace(workload.batch, in_batches=True))
    records = Cluster(spec("slo"), DEVICE, together).run().records
    batch = [record for record in records if not record.service.online]
    assert len(batch) > 24
    for begin in range(6, len(batch) - 5, 6):
        times_s = {record.sent_s for record in batch[begin : begin + 6]}
        assert times_s == {max(record.end_s for record in batch[begin - 6 : begin])}
