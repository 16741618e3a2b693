"""The simulated cluster: deterministic, loses nothing, agrees with queueing theory."""

import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from services.core.cost.model import CostModel
from services.core.cost.padded import Execution
from services.core.planner.batch import IterationShape
from services.core.planner.config import IterationConfig
from services.core.scheduler.state_config import StateConfig
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.delays import Delays
from tideserve.sim.report import Outcome, Outcomes, figures
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import (
    Arrival,
    ClosedLoop,
    Length,
    OpenLoop,
    gamma_times,
    on_off_phases,
    phased_times,
    with_lengths,
)

DEVICE = CostTimeModel(CostModel(alpha=1e-8, beta=1e-4, gamma=0.02, lam=0.0195))
PATIENT = StateConfig(10_000, 1e6, lateness=0.0)
NO_DELAYS = Delays(ask_s=0, start_s=0, token_s=0, report_s=0, report_pause_s=0)


def make_spec(**changes) -> ClusterSpec:
    iteration = IterationConfig(
        block_size=16, num_blocks=800, max_batch_tokens=512, max_running=64, max_waiting=1000
    )
    return ClusterSpec(**{"instances": 3, "iteration": iteration, "max_model_len": 8192} | changes)


def poisson(
    seed: int, rate_per_s: float, duration_s: float, prompt: float = 300, output: float = 100
) -> OpenLoop:
    rng = random.Random(seed)
    times = gamma_times(rate_per_s, 1.0, duration_s, rng)
    lengths = (Length(prompt, 0.8, most=4000), Length(output, 0.8, most=2000))
    return OpenLoop(list(with_lengths(times, *lengths, rng)))


def run(spec: ClusterSpec, workload: OpenLoop | ClosedLoop) -> tuple[Cluster, Outcomes]:
    cluster = Cluster(spec, DEVICE, workload)
    return cluster, cluster.run()


def check_conservation(cluster: Cluster, outcomes: Outcomes) -> None:
    """Every request has ended once, and no resources are held."""
    assert all(record.outcome is not Outcome.RUNNING for record in outcomes.records)
    for record in outcomes.records:
        assert record.end_s >= record.sent_s
        if record.outcome is Outcome.COMPLETED:
            assert record.sent_s <= record.first_s <= record.end_s
    for instance in cluster.instances.values():
        instance.state.check_invariants()
        assert instance.state.pool.free_count == instance.state.config.num_blocks
        assert not instance.state.sequences
    cluster.scheduler.check_invariants()
    snapshot = cluster.scheduler.snapshot(outcomes.simulated_s)
    assert snapshot.queued == 0
    refused = sum(snapshot.refused_total.values())
    assert snapshot.assigned_total + refused == len(outcomes.records)


def test_the_same_seed_gives_the_same_outcomes() -> None:
    runs = [figures(run(make_spec(), poisson(seed, 8, 40))[1]) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0]["ttft_s"] != runs[2]["ttft_s"]


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_and_frees_its_blocks(seed: int) -> None:
    workload = poisson(seed, 10, 30, output=200)
    cluster, outcomes = run(make_spec(), workload)
    check_conservation(cluster, outcomes)
    result = figures(outcomes)
    assert result["completed"] == result["sent"] == len(workload.arrivals)
    assert result["unfinished"] == 0


@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize("seed", range(3))
def test_fast_forward_changes_no_time_of_a_single_instance(seed: int, execution: Execution) -> None:
    workload = poisson(seed, 4, 40, output=150)
    # With room for all: where memory is short, the missing reports shift dispatch a little. So they
    # do where the scheduler holds requests back until a report shows less prefill work.
    iteration = replace(make_spec().iteration, num_blocks=8000, execution=execution)
    spec = make_spec(instances=1, iteration=iteration, scheduler=PATIENT)
    sides = [run(replace(spec, fast_forward=fast), workload)[1] for fast in (True, False)]
    assert sides[0].iterations == sides[1].iterations
    # With static batches, no run of decodes is fast-forwarded while any request waits.
    share = 50 if execution is Execution.STATIC else 3
    assert sides[0].iterations_fast_forwarded > sides[0].iterations / share
    for stepped, jumped in zip(sides[0].records, sides[1].records, strict=True):
        assert stepped.first_s == pytest.approx(jumped.first_s, abs=1e-9)
        assert stepped.end_s == pytest.approx(jumped.end_s, abs=1e-9)


def test_a_single_instance_matches_an_m_d_1_queue() -> None:
    # One request at a time, one iteration each, all of the same length: M/D/1.
    iteration = IterationConfig(16, 1000, 512, 1, 10_000)
    spec = make_spec(instances=1, iteration=iteration, delays=NO_DELAYS, scheduler=PATIENT)
    service_s = DEVICE.iteration_s(IterationShape(0, 0, ((0, 256),)))
    load = 0.7
    rng = random.Random(5)
    times = gamma_times(load / service_s, 1.0, 4000 * service_s / load, rng)
    _, outcomes = run(spec, OpenLoop([Arrival(time_s, 256, 1) for time_s in times]))
    waits_s = [record.e2e_s - service_s for record in outcomes.records]
    predicted_s = load * service_s / (2 * (1 - load))
    assert min(waits_s) == pytest.approx(0, abs=1e-9)
    assert statistics.mean(waits_s) == pytest.approx(predicted_s, rel=0.15)


def test_an_idle_cluster_takes_the_time_of_the_model_and_the_delays() -> None:
    spec = make_spec()
    _, outcomes = run(spec, OpenLoop([Arrival(1.0, 100, 3)]))
    (record,) = outcomes.records
    delays = spec.delays
    prefill_s = DEVICE.iteration_s(IterationShape(0, 0, ((0, 100),)))
    around_s = delays.ask_s + delays.start_s + delays.token_s
    assert record.ttft_s == pytest.approx(around_s + prefill_s)
    decodes_s = DEVICE.decodes_s(1, 100, 2)
    assert record.e2e_s - record.ttft_s == pytest.approx(decodes_s)


def test_overload_queues_then_refuses_and_recovers() -> None:
    burst = [Arrival(index * 0.001, 400, 200) for index in range(300)]
    later = [Arrival(400.0 + index, 100, 10) for index in range(10)]
    spec = make_spec(instances=1, scheduler=StateConfig(100, 60.0, lateness=0.0))
    cluster, outcomes = run(spec, OpenLoop(burst + later))
    check_conservation(cluster, outcomes)
    result = figures(outcomes)
    assert result["rejected"] >= 150
    reasons = {record.reason for record in outcomes.records} - {""}
    assert reasons == {"queue_full", "expired"} or reasons == {"queue_full"}
    assert result["kv_demand_peak_ratio"] > 1.5
    assert result["kv_usage_peak"] > 0.9
    assert all(record.ttft_s < 0.5 for record in outcomes.records[-10:]), "the burst is over"


def test_kv_overflow_preempts_and_all_requests_complete() -> None:
    iteration = replace(make_spec().iteration, num_blocks=120)
    spec = make_spec(instances=2, iteration=iteration, scheduler=PATIENT)
    cluster, outcomes = run(spec, poisson(3, 6, 30, prompt=60, output=300))
    check_conservation(cluster, outcomes)
    assert outcomes.preemptions > 0
    assert figures(outcomes)["completed"] == len(outcomes.records)


def test_a_closed_loop_keeps_its_concurrency() -> None:
    requests = iter([Arrival(0.0, 64, 20)] * 50)
    _, outcomes = run(make_spec(), ClosedLoop(requests, 5))
    assert len(outcomes.records) == 50
    for record in outcomes.records:
        meanwhile = [o for o in outcomes.records if o.sent_s <= record.sent_s < o.end_s]
        assert len(meanwhile) <= 5


def test_late_reports_do_not_hide_an_idle_worker_from_a_retry() -> None:
    requests = iter([Arrival(0.0, 64, 20 + 7 * (number % 5)) for number in range(60)])
    spec = make_spec(instances=2, delays=Delays(report_s=0.05))
    _, outcomes = run(spec, ClosedLoop(requests, 2))
    # The first two wait for the first reports.
    waits_s = [record.first_s - record.sent_s for record in outcomes.records[2:]]
    assert waits_s == pytest.approx([min(waits_s)] * 58)


def test_a_request_too_large_for_every_instance_is_refused_at_once() -> None:
    _, outcomes = run(make_spec(max_model_len=512), OpenLoop([Arrival(0.0, 600, 10)]))
    assert outcomes.records[0].reason == "too_large"


def test_on_off_arrivals_keep_their_phases() -> None:
    phases = list(on_off_phases((2.0, 50), (8.0, 0), 41.0))
    assert phases == [(2.0, 50), (8.0, 0)] * 4 + [(1.0, 50)]
    times = list(phased_times(phases, 1.0, random.Random(1)))
    assert all(time_s % 10 < 2 for time_s in times)
    assert 300 < len(times) < 500


def test_gamma_arrivals_have_their_rate_and_spread() -> None:
    times = list(gamma_times(20, 2.0, 2000, random.Random(2)))
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) / 2000 == pytest.approx(20, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(2.0, rel=0.1)
    assert list(gamma_times(2, 0, 2, random.Random(0))) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("count", [1, 2, 17])
def test_run_time_is_the_sum_of_iterations(count: int) -> None:
    one_by_one_s = sum(
        DEVICE.iteration_s(IterationShape(7, 900 + 7 * step, ())) for step in range(count)
    )
    assert DEVICE.decodes_s(7, 900, count) == pytest.approx(one_by_one_s)
    chunks = [(900 // 7, 1)] * 7 + [(32, 100)]
    shape = IterationShape(7, 7 * (900 // 7), ((32, 100),))
    assert DEVICE.iteration_s(shape) == pytest.approx(DEVICE.model.batch_s(chunks))
