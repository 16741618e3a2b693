"""Metrics of requests."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from services.core.request import FinishReason, Limits, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import ChoiceRecord, WorkerSegment
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.serving.request_meter import measured
from services.gateway.vocabulary.errors import (
    ContextExceeded,
    Expired,
    GatewayError,
    QueueFull,
    ServiceUnavailable,
    ShuttingDown,
    TooLate,
    WorkerLost,
)
from services.gateway.vocabulary.message import WorkerTimes
from tests.support.exposition import Samples, samples, value

REQUEST = Request("r", (1, 2, 3), Sampling(), Limits(max_tokens=9), arrival_s=0.0)
CHOICE = PreparedChoice(REQUEST, "m", n=3)


class World:
    """Metrics of requests with identical times."""

    def __init__(self) -> None:
        self.metrics = Metrics(("m",), CollectorRegistry())
        self.times: WorkerTimes | None = WorkerTimes(0.25, 0.5, 2.0)

    def samples(self) -> Samples:
        return samples(self.metrics.render().decode())

    def run(
        self, ending: BaseException | None, *bursts: int, service: Service = DEFAULT_SERVICE
    ) -> None:
        """A choice: bursts of tokens a second apart, and then its end."""
        now_s = 100.0
        choice = ChoiceRecord([(101.0, 104.0)])
        request = replace(REQUEST, arrival_s=now_s, service=service)
        prepared = replace(CHOICE, request=request)
        with measured(self.metrics.of("m"), prepared, choice, now_s) as meter:
            choice.segments.append(WorkerSegment("w0", "g", 1, 104.0))
            now_s += 4
            for number, count in enumerate(bursts):
                now_s += 1
                assert meter.observe_tokens(count, now_s) == (number > 0)
            if ending is not None:
                raise ending
            choice.segments[-1].times = self.times
            meter.finish(FinishReason.STOP)


@pytest.fixture
def world() -> World:
    return World()


def test_a_finished_request_is_in_every_histogram(world: World) -> None:
    world.run(None, 1, 2, 1)
    exported = world.samples()
    sums = {
        "e2e_request_latency_seconds": 7.0,
        "request_queue_time_seconds": 3.25,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 4,
        "request_max_num_generation_tokens": 4,
        "request_params_n": 3,
        "request_params_max_tokens": 9,
    }
    for name, total in sums.items():
        assert value(exported, f"vllm:{name}_sum", model_name="m") == pytest.approx(total), name
        assert value(exported, f"vllm:{name}_count", model_name="m") == 1, name
    for name, total, count in (
        ("time_to_first_token_seconds", 5.0, 1),
        ("inter_token_latency_seconds", 0.5 + 1.0, 2),
        ("request_time_per_output_token_seconds", 2 / 3, 1),
    ):
        assert of_class(exported, f"{name}_sum") == pytest.approx(total), name
        assert of_class(exported, f"{name}_count") == count, name
    assert value(exported, "tideserve_gateway_output_tokens_total", model_name="m") == 4
    assert ended(exported) == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    totals = world.metrics.totals()["m"]
    assert (totals.output_tokens, totals.first_tokens, totals.first_tokens_s) == (4, 1, 5.0)


def test_phases_missing_from_the_worker_are_not_recorded(world: World) -> None:
    world.times = None
    world.run(None, 1)
    exported = world.samples()
    assert value(exported, "vllm:request_queue_time_seconds_sum", model_name="m") == 3.0
    for phase in ("prefill", "decode", "inference"):
        assert value(exported, f"vllm:request_{phase}_time_seconds_count", model_name="m") == 0


def of_class(exported: Samples, name: str, service_class: str = "standard") -> float | None:
    labels = {"model_name": "m", "class": service_class}
    return value(exported, f"vllm:{name}", **labels)


def slo(exported: Samples, which: str, service_class: str, metric: str) -> float | None:
    labels = {"model_name": "m", "class": service_class, "metric": metric}
    return value(exported, f"tideserve_gateway_slo_{which}_total", **labels)


@pytest.mark.parametrize(
    ("service", "ttft", "tpot"),
    [
        # Tokens after the first: two after half a second each, one after a second, two after 0.5.
        (Service(ServiceClass.INTERACTIVE, ttft_s=5.0, tpot_s=0.6), (1, 0), (4, 1)),
        (Service(ttft_s=4.9, tpot_s=0.7, token_group=2), (0, 1), (2, 1)),
        (Service(ttft_s=4.9, tpot_s=0.7, token_group=3), (0, 1), (2, 0)),
        (Service(tpot_s=0.59, token_group=9), (0, 0), (0, 1)),
        (Service(ServiceClass.BATCH), (0, 0), (0, 0)),
    ],
)
def test_attained_and_missed_targets_are_counted(
    world: World, service: Service, ttft: tuple[int, int], tpot: tuple[int, int]
) -> None:
    """First tokens count once per choice, the others once per group of the promised size."""
    world.run(None, 1, 2, 1, 2, service=service)
    exported = world.samples()
    name = service.service_class.value
    for metric, counts in (("ttft", ttft), ("tpot", tpot)):
        assert (
            tuple(slo(exported, which, name, metric) for which in ("attained", "missed")) == counts
        )
    assert of_class(exported, "time_to_first_token_seconds_count", name) == 1


def test_a_group_that_did_not_end_counts_only_if_its_request_finished(world: World) -> None:
    service = Service(tpot_s=0.5, token_group=4)
    with pytest.raises(WorkerLost):
        world.run(WorkerLost("gone"), 1, 2, service=service)
    assert slo(world.samples(), "attained", "standard", "tpot") == 0
    world.run(None, 1, 2, service=service)
    assert slo(world.samples(), "attained", "standard", "tpot") == 1
    assert slo(world.samples(), "missed", "standard", "tpot") == 0


def test_a_request_that_fails_before_a_token_misses_its_target(world: World) -> None:
    service = Service(ServiceClass.INTERACTIVE, ttft_s=5.0)
    with pytest.raises(WorkerLost):
        world.run(WorkerLost("gone"), service=service)
    with pytest.raises(GeneratorExit):
        world.run(GeneratorExit(), service=service)
    assert slo(world.samples(), "missed", "interactive", "ttft") == 1
    with pytest.raises(WorkerLost):
        world.run(WorkerLost("gone"), 1, service=service)
    assert slo(world.samples(), "attained", "interactive", "ttft") == 1
    assert slo(world.samples(), "missed", "interactive", "ttft") == 1


def test_choices_inflight_are_counted_by_class(world: World) -> None:
    labels = {"model_name": "m", "class": "batch"}
    name = "tideserve_gateway_choices_inflight"
    choice = replace(CHOICE, request=replace(REQUEST, service=Service(ServiceClass.BATCH)))
    with measured(world.metrics.of("m"), choice, ChoiceRecord(), 0.0):
        assert value(world.samples(), name, **labels) == 1
    assert value(world.samples(), name, **labels) == 0


def ended(exported: Samples) -> dict[str, float]:
    name = "vllm:request_success_total"
    return {
        dict(labels)["finished_reason"]: count
        for (n, labels), count in exported.items()
        if n == name
    }


@pytest.mark.parametrize(
    ("ending", "reason"), [(GeneratorExit(), "abort"), (WorkerLost("gone"), "error")]
)
def test_unfinished_requests_are_counted_by_reason(
    world: World, ending: BaseException, reason: str
) -> None:
    with pytest.raises(type(ending)):
        world.run(ending, 1)
    exported = world.samples()
    assert ended(exported)[reason] == 1 and sum(ended(exported).values()) == 1
    assert of_class(exported, "time_to_first_token_seconds_count") == 1
    assert value(exported, "vllm:e2e_request_latency_seconds_count", model_name="m") == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull("full"), "queue_full"),
        (TooLate("long"), "too_late"),
        (ServiceUnavailable("no worker"), "unavailable"),
        (ShuttingDown("stops"), "shutting_down"),
        (Expired("late"), "expired"),
        (WorkerLost("gone"), None),
        (ContextExceeded("long"), None),
    ],
)
@pytest.mark.parametrize("service_class", [None, *ServiceClass])
def test_capacity_refusals_are_counted_by_reason(
    world: World, error: GatewayError, reason: str | None, service_class: ServiceClass | None
) -> None:
    world.metrics.count_refusal(error, service_class, None)
    name = "vllm:admission_rejections_total"
    rows = {labels: count for (which, labels), count in world.samples().items() if which == name}
    counts = {(dict(row)["reason"], dict(row)["class"]): count for row, count in rows.items()}
    reasons = {"queue_full", "too_late", "unavailable", "shutting_down", "expired"}
    assert set(counts) == {
        (reason, kind) for reason in reasons for kind in (*ServiceClass, "unknown")
    }
    counted = {(reason, service_class or "unknown")} if reason else set()
    assert {which for which, count in counts.items() if count} == counted
