"""A worker's own metrics, computed on demand from the last frame of its engine."""

from collections.abc import Callable, Iterable
from dataclasses import asdict

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.common.process_metrics import cumulative
from services.common.vllm_names import LABELS, WAITING, WAITING_HELP
from services.core.cost.iteration_tokens import UPPER_BOUNDS
from services.worker.engine_client import EngineClient
from services.worker.group_view import Place
from services.worker.ipc import EngineReady

WORKER_TIMES = {
    "pipeline_busy_s": (
        "pipeline_busy_seconds",
        "Time in which the worker, as a stage of a pipeline, ran microbatches.",
    ),
    "pipeline_bubble_s": (
        "pipeline_bubble_seconds",
        "Time in which it was idle while a microbatch was anywhere in its pipeline.",
    ),
    "prefill_s": (
        "prefill_seconds",
        "Time of iterations with a chunk of more than one token; 0 without a profile.",
    ),
    "prefill_predicted_s": (
        "prefill_predicted_seconds",
        "Time of iterations with a chunk of more than one token, as the cost model predicted it;"
        " 0 without a profile.",
    ),
    "decode_s": ("decode_seconds", "Time of iterations that only decode; 0 without a profile."),
    "decode_predicted_s": (
        "decode_predicted_seconds",
        "Time of iterations that only decode, as the cost model predicted it; 0 without a profile.",
    ),
}


_LABELS = ("worker", "model_name")
CLASS_TOKENS = {
    "processed": "Prompt tokens run for the first time, and output tokens; by a group's leader.",
    "recomputed": "Tokens that ran again, since their KV was lost. Counted by a group's leader.",
}
"""Counters by class, which is `batch`, or `online` for all others."""
INTERRUPTIONS = {
    "preempted_iterations": "Iterations of the class batch alone that were interrupted between"
    " layers.",
    "resumed_iterations": "Times that an interrupted iteration went on at the layer where it was.",
    "discarded_tokens": "Tokens of interrupted iterations that had to run again from their first"
    " layer.",
}


class WorkerCollector(Collector):
    """Computes metrics when they are asked for."""

    def __init__(
        self,
        worker_id: str,
        model_name: str,
        engine: EngineClient,
        facts: EngineReady,
        place: Callable[[], Place | None],
    ) -> None:
        """`facts`: what the engine has loaded."""
        self._worker_id = worker_id
        self._model_name = model_name
        self._engine = engine
        self._facts = facts
        self._place = place

    def collect(self) -> Iterable[Metric]:
        """All metrics of the worker."""
        yield from self._vllm()
        yield from self._memory()
        yield from self._state()

    def _vllm(self) -> Iterable[Metric]:
        facts, load = self._facts, self._engine.report.load
        values = (self._model_name, self._worker_id)
        gauges = {
            "vllm:num_requests_running": ("Requests in the batch.", load.running),
            WAITING: (WAITING_HELP, load.waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of the KV blocks that is in use; 1 is full.",
                1 - load.kv_blocks_free / load.kv_blocks_total if load.kv_blocks_total else 0,
            ),
        }
        counters = {
            "vllm:num_preemptions": (
                "Preemptions: a request lost its KV blocks, and was computed again.",
                load.preemptions_total,
            ),
            "vllm:prompt_tokens": (
                "Prompt tokens of the requests whose first token came from this worker.",
                load.prompt_tokens_total,
            ),
            "vllm:generation_tokens": ("Tokens generated.", self._engine.generated_tokens),
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                load.prefix_queries_total,
            ),
            "vllm:prefix_cache_hits": (
                "Prompt tokens found in the prefix cache (hits), which were not computed again.",
                load.prefix_hits_total,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(values, value)
            yield gauge
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(values, count)
            yield counter
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Sizes of the KV cache as labels; the value is always 1.",
            labels=(*LABELS, "block_size", "num_gpu_blocks"),
        )
        cache.add_metric((*values, str(facts.block_size), str(facts.kv_blocks_total)), 1)
        yield cache
        yield self._iteration_tokens()

    def _iteration_tokens(self) -> Metric:
        ran = self._engine.report.iteration_tokens
        # With this suffix, as vLLM has it, although it is a histogram.
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens of an iteration: prompt and generated ones. Counted by a group's leader.",
            labels=LABELS,
        )
        counts = ran.counts or [0] * (len(UPPER_BOUNDS) + 1)
        buckets = cumulative(UPPER_BOUNDS, counts)
        tokens.add_metric((self._model_name, self._worker_id), buckets, ran.tokens)
        return tokens

    def _memory(self) -> Iterable[Metric]:
        facts, report = self._facts, self._engine.report
        load, parameters = report.load, report.parameter_bytes
        gauges = {
            "budget_bytes": ("Device memory budget.", facts.budget_bytes),
            "parameter_bytes": (
                "Device memory behind parameters; less while layers are dropped.",
                parameters,
            ),
            "kv_bytes": (
                "Device memory that KV blocks may fill: what parameters leave of the arena.",
                max(0, facts.arena_bytes - parameters),
            ),
            "staging_bytes": ("Device memory kept for staging.", facts.staging_bytes),
            "arena_bytes": ("Device memory for parameters and KV together.", facts.arena_bytes),
            "kv_blocks_free": ("KV blocks that are free.", load.kv_blocks_free),
            "kv_blocks_total": ("KV blocks in all.", load.kv_blocks_total),
            "kv_blocks_wanted": (
                "KV blocks that its waiting requests need before they can run.",
                load.kv_blocks_wanted,
            ),
            "kv_blocks_batch": (
                "KV blocks of running requests of the class batch.",
                load.kv_blocks_batch,
            ),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(name, text, value)

    def _state(self) -> Iterable[Metric]:
        engine, told, place = self._engine, self._engine.report, self._place()
        yield self._gauge(
            "engine_responsive",
            "1 while the engine process gives signs of life within `engine_unready_s`.",
            engine.responsive,
        )
        yield self._gauge(
            "engine_silence_seconds",
            "Since the engine process spoke last; it does not while an iteration runs.",
            engine.silent_s,
        )
        yield self._gauge("epoch", "Epoch of the configuration that the engine runs.", told.epoch)
        yield self._gauge(
            "in_merged_group",
            "1 while it serves together with other workers.",
            place is not None and place.shared,
        )
        seconds = asdict(told.stage) | asdict(told.iterations)
        for field, (name, text) in WORKER_TIMES.items():
            counter = CounterMetricFamily(f"tideserve_worker_{name}", text, labels=_LABELS)
            counter.add_metric((self._worker_id, self._model_name), seconds[field])
            yield counter
        yield from self._class_tokens()
        counts = asdict(engine.report.load)
        for name, text in INTERRUPTIONS.items():
            counter = CounterMetricFamily(f"tideserve_worker_{name}", text, labels=_LABELS)
            counter.add_metric((self._worker_id, self._model_name), counts[f"{name}_total"])
            yield counter

    def _class_tokens(self) -> Iterable[Metric]:
        counts = asdict(self._engine.report.load.tokens)
        for what, text in CLASS_TOKENS.items():
            counter = CounterMetricFamily(
                f"tideserve_worker_{what}_tokens", text, labels=(*_LABELS, "class")
            )
            for kind in ("online", "batch"):
                labels = (self._worker_id, self._model_name, kind)
                counter.add_metric(labels, counts[f"{kind}_{what}_tokens_total"])
            yield counter

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"tideserve_worker_{name}", text, labels=_LABELS)
        gauge.add_metric((self._worker_id, self._model_name), value)
        return gauge
