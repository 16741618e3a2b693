"""A worker's own metrics."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from services.core.adapter import AdapterUse
from services.core.cost.bubble import StageTime
from services.core.cost.iteration_time import IterationTime
from services.core.histogram import ITERATION_TOKENS, PREEMPTION_S, Histogram, HistogramMeter
from services.core.report import ClassTokens, DeadlineUse, EngineReport, Load
from services.worker.group_view import Place
from services.worker.ipc import EngineReady
from services.worker.metrics import WorkerCollector
from tests.support.exposition import Samples, collected, value

FACTS = EngineReady(1024, 100, 16, 40, 4096, 10_000, 3000, 500, arena_bytes=9000)
LABELS = {"model_name": "m", "engine": "w0"}
OWN = {"model_name": "m", "worker": "w0"}


def engine(**reported: Any) -> Any:
    meter = HistogramMeter(ITERATION_TOKENS)
    for tokens in (1, 200):
        meter.add(tokens)
    report = EngineReport(
        Load(3, 2, 10, 7, 5, 40, 99, 1, 1, 6, tokens=ClassTokens(300, 30, 900, 90)),
        4,
        False,
        2000,
        StageTime(7.5, 2.5),
        IterationTime(3.5, 3.0, 2.0, 1.5),
        meter.histogram,
    )
    return SimpleNamespace(
        report=replace(report, **reported), generated_tokens=77, responsive=True, silent_s=0.25
    )


def exported(engine: Any, place: Place | None = None) -> Samples:
    return collected(WorkerCollector("w0", "m", cast(Any, engine), FACTS, lambda: place))


def test_metric_names_match_the_dashboards() -> None:
    metrics = exported(engine())
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.75,
        "vllm:num_preemptions_total": 5,
        "vllm:prompt_tokens_total": 99,
        "vllm:generation_tokens_total": 77,
        "vllm:iteration_tokens_total_count": 2,
        "vllm:iteration_tokens_total_sum": 201,
    }
    for name, number in expected.items():
        assert value(metrics, name, **LABELS) == number, name
    sizes = {"block_size": "16", "num_gpu_blocks": "40"}
    assert value(metrics, "vllm:cache_config_info", **LABELS, **sizes) == 1
    bucket = "vllm:iteration_tokens_total_bucket"
    assert value(metrics, bucket, **LABELS, le="1.0") == 1
    assert value(metrics, bucket, **LABELS, le="256.0") == 2


def test_memory_and_iteration_times_are_exported() -> None:
    metrics = exported(engine(), place=Place("g", 4, True, shared=True))
    expected = {
        "budget_bytes": 10_000,
        "parameter_bytes": 2000,
        "kv_bytes": 7000,
        "arena_bytes": 9000,
        "staging_bytes": 500,
        "kv_blocks_free": 10,
        "kv_blocks_total": 40,
        "kv_blocks_wanted": 7,
        "kv_blocks_batch": 6,
        "engine_responsive": 1,
        "engine_silence_seconds": 0.25,
        "epoch": 4,
        "in_merged_group": 1,
        "pipeline_busy_seconds_total": 7.5,
        "pipeline_bubble_seconds_total": 2.5,
        "prefill_seconds_total": 3.5,
        "decode_predicted_seconds_total": 1.5,
    }
    for name, number in expected.items():
        assert value(metrics, f"tideserve_worker_{name}", **OWN) == number, name


def test_computed_tokens_are_exported_by_class() -> None:
    metrics = exported(engine())
    expected = {
        ("processed", "online"): 300,
        ("recomputed", "online"): 30,
        ("processed", "batch"): 900,
        ("recomputed", "batch"): 90,
    }
    for (phase, kind), number in expected.items():
        labels = OWN | {"class": kind}
        assert value(metrics, f"tideserve_worker_{phase}_tokens_total", **labels) == number


def test_interruptions_of_batch_work_are_exported() -> None:
    load = Load(
        *(0, 0, 0, 0),
        preempted_iterations_total=5,
        resumed_iterations_total=4,
        discarded_tokens_total=2048,
    )
    metrics = exported(engine(load=load))
    for name, number in (
        ("preempted_iterations", 5),
        ("resumed_iterations", 4),
        ("discarded_tokens", 2048),
    ):
        assert value(metrics, f"tideserve_worker_{name}_total", **OWN) == number


def test_shared_tails_are_counted() -> None:
    metrics = exported(
        engine(load=Load(0, 0, 0, 0, shared_tails_total=3, lost_tail_tokens_total=21))
    )
    assert value(metrics, "tideserve_worker_shared_tails_total", **OWN) == 3
    assert value(metrics, "tideserve_worker_lost_tail_tokens_total", **OWN) == 21


def test_the_use_of_deadlines_is_reported() -> None:
    metrics = exported(
        engine(deadlines=DeadlineUse(0.25, 8.0, 6.0, {"interactive": 3}, {"standard": 2}))
    )
    assert value(metrics, "tideserve_worker_harvest_share", **OWN) == 0.25
    assert value(metrics, "tideserve_worker_budget_seconds_total", **OWN) == 8.0
    assert value(metrics, "tideserve_worker_budget_used_seconds_total", **OWN) == 6.0
    expected = {
        ("interactive", "ttft"): 3,
        ("standard", "ttft"): 0,
        ("interactive", "tpot"): 0,
        ("standard", "tpot"): 2,
    }
    for (kind, metric), number in expected.items():
        labels = OWN | {"class": kind, "metric": metric}
        assert value(metrics, "tideserve_worker_missed_deadlines_total", **labels) == number


def test_preemption_latency_is_a_histogram() -> None:
    meter = HistogramMeter(PREEMPTION_S)
    for seconds in (0.002, 0.5, 9.0):
        meter.add(seconds)
    metrics = exported(engine(preemption_s=meter.histogram))
    name = "tideserve_worker_preemption_seconds"
    assert value(metrics, f"{name}_sum", **OWN) == 9.502
    for bound, number in (("0.001", 0), ("0.0025", 1), ("0.5", 2), ("+Inf", 3)):
        assert value(metrics, f"{name}_bucket", **OWN, le=bound) == number


def test_restored_slabs_are_counted_by_source() -> None:
    metrics = exported(engine(restored_slabs={"peer": 7, "disk": 2}))
    for source, number in (("host", 0), ("peer", 7), ("disk", 2)):
        labels = OWN | {"source": source}
        assert value(metrics, "tideserve_worker_restored_slabs_total", **labels) == number


def test_adapters_and_their_loads_are_counted() -> None:
    use = AdapterUse((), 1, 4, 3, 7, 2.5)
    metrics = exported(engine(load=Load(0, 0, 10, 0, adapter_use=use)))
    expected = {
        "adapter_slots": 4,
        "adapters_loaded": 3,
        "adapter_loads_total": 7,
        "adapter_load_seconds_total": 2.5,
    }
    for name, number in expected.items():
        assert value(metrics, f"tideserve_worker_{name}", **OWN) == number, name


def test_an_engine_that_has_not_run_yet_has_empty_histograms() -> None:
    metrics = exported(engine(iteration_tokens=Histogram(), load=Load(0, 0, 0, 0)))
    assert value(metrics, "vllm:iteration_tokens_total_count", **LABELS) == 0
    assert value(metrics, "vllm:kv_cache_usage_perc", **LABELS) == 0


def test_the_origin_of_the_cost_model_is_a_label_without_the_reason() -> None:
    name = "tideserve_worker_cost_model_info"
    assert value(exported(engine(cost_model="load")), name, **OWN, origin="load") == 1
    none = exported(engine(cost_model="none: no profile is stored"))
    assert value(none, name, **OWN, origin="none") == 1
