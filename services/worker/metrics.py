"""A worker's Prometheus metrics, computed at each scrape from the last report of its engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from services.core.histogram import ITERATION_TOKENS, PREEMPTION_S, Histogram
from services.core.service import ServiceClass
from services.worker.engine_client import EngineClient
from services.worker.group_view import Place
from services.worker.ipc import EngineReady

WORKER_TIMES = {
    "pipeline_busy_s": (
        "pipeline_busy_seconds",
        "Time in which the worker ran microbatches, as a pipeline stage.",
    ),
    "pipeline_bubble_s": (
        "pipeline_bubble_seconds",
        "Time in which the worker was idle while its pipeline had a microbatch in flight.",
    ),
    "prefill_s": (
        "prefill_seconds",
        "Time of iterations with prefill, that is a chunk of several tokens; 0 without a cost"
        " model.",
    ),
    "prefill_predicted_s": (
        "prefill_predicted_seconds",
        "Time of iterations with prefill as predicted by the cost model; 0 without a cost model.",
    ),
    "decode_s": ("decode_seconds", "Time of decode-only iterations; 0 without a cost model."),
    "decode_predicted_s": (
        "decode_predicted_seconds",
        "Time of decode-only iterations as predicted by the cost model; 0 without a cost model.",
    ),
}


_LABELS = ("worker", "model_name")
CLASS_TOKENS = {
    "processed": "Prompt tokens computed for the first time, plus output tokens. Counted by the"
    " group's leader.",
    "recomputed": "Tokens computed again because their KV was lost. Counted by the group's leader.",
}
"""Counters by service class: `batch`, or `online` for all other classes."""
INTERRUPTIONS = {
    "preempted_iterations": "Batch-only iterations that were preempted between layers.",
    "resumed_iterations": "Preempted iterations that resumed at the layer where they stopped.",
    "discarded_tokens": "Tokens of preempted iterations that had to restart at the first layer.",
}


BUDGETS = {
    "budget": "Time that the next online deadline left for the iterations planned to meet it."
    " Counted by the group's leader.",
    "budget_used": "Duration of the iterations planned to meet the next online deadline. Counted by"
    " the group's leader.",
}
HARVEST_SHARE = (
    "Share of the slack before online deadlines that batch requests may use now, up to `harvest`; 0"
    " with a `scheduling` without deadlines."
)
MISSED_DEADLINES = (
    "Missed deadlines of first tokens (ttft) and of token groups (tpot), with `scheduling: slo`."
    " Counted by the group's leader."
)
PREEMPTION = (
    "Time from the arrival of an online request at the worker until a batch-only iteration yielded"
    " to it."
)


SLAB_SOURCES = ("host", "peer", "disk")
RESTORED_SLABS = (
    "Dropped layers, embeddings and heads that were restored, by source: the worker's copy in host"
    " memory, another worker, or the model folder."
)


MOVED_REQUESTS = {
    "shipped_total": (
        "shipped_requests",
        "Running requests that moved from this worker to another with their KV.",
    ),
    "received_total": (
        "received_requests",
        "Running requests that moved to this worker with their KV.",
    ),
    "kept_total": (
        "kept_requests",
        "Running requests that were to move with their KV, and stayed because that failed.",
    ),
    "shipped_blocks_total": (
        "shipped_blocks",
        "KV blocks that were sent for requests that move.",
    ),
    "handed_over_total": (
        "handed_over_requests",
        "Requests whose prompt this worker computed, and whose output another one computes.",
    ),
    "shipping_s": (
        "shipping_seconds",
        "Seconds during which KV of requests that move or are handed over was being sent.",
    ),
    "hand_overs_kept_total": (
        "kept_hand_overs",
        "Requests that were to be handed over after their prompt, and stayed because that failed.",
    ),
}


HOST_COPIES = {
    "saved_blocks_total": ("saved_blocks", "KV blocks that were copied to host memory."),
    "save_bytes_total": ("save_bytes", "Bytes of KV that were copied to host memory."),
    "recall_jobs_total": ("recall_jobs", "Times that KV was copied back from host memory."),
    "recalled_tokens_total": (
        "recalled_tokens",
        "Tokens whose KV was copied back from host memory, and so not computed.",
    ),
    "host_hit_tokens_total": (
        "host_hit_tokens",
        "Of the recalled tokens, those of prompts that had not run at the worker before.",
    ),
    "host_failures_total": (
        "host_failures",
        "Damaged copies of KV in host memory, and losses of all copies.",
    ),
}
"""Counters of KV in host memory."""
SHARED_TAILS = {
    "shared_tails_total": (
        "shared_tails",
        "Last KV blocks of batch requests that online requests have shared, with `block_sharing`.",
    ),
    "lost_tail_tokens_total": (
        "lost_tail_tokens",
        "Tokens of batch requests in shared blocks that they lost, and that ran again.",
    ),
}
ADAPTER_LOADS = {
    "adapter_loads": "LoRA adapters that were loaded into a slot.",
    "adapter_load_seconds": "Time to load LoRA adapters, in which the engine computes nothing.",
}


class WorkerCollector(Collector):
    """Computes the metrics at each scrape."""

    def __init__(
        self,
        worker_id: str,
        model_name: str,
        engine: EngineClient,
        facts: EngineReady,
        place: Callable[[], Place | None],
    ) -> None:
        """`facts`: the loaded model and its memory. `place` returns the group that it serves."""
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
        yield from self._deadlines()
        yield from self._adapters()

    def _vllm(self) -> Iterable[Metric]:
        facts, load = self._facts, self._engine.report.load
        values = (self._model_name, self._worker_id)
        gauges = {
            "vllm:num_requests_running": ("Running requests.", load.running),
            WAITING: (WAITING_HELP, load.waiting),
            "vllm:kv_cache_usage_perc": (
                "Fraction of KV blocks in use, 0 to 1.",
                1 - load.kv_blocks_free / load.kv_blocks_total if load.kv_blocks_total else 0,
            ),
        }
        counters = {
            "vllm:num_preemptions": (
                "Preemptions, in which a request loses its KV blocks and is recomputed later.",
                load.preemptions_total,
            ),
            "vllm:prompt_tokens": (
                "Prompt tokens of requests whose first token came from this worker.",
                load.prompt_tokens_total,
            ),
            "vllm:generation_tokens": ("Output tokens.", self._engine.generated_tokens),
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                load.prefix_queries_total,
            ),
            "vllm:prefix_cache_hits": (
                "Prompt tokens found in the prefix cache, and so not computed.",
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
        # vLLM's name has this suffix, although the metric is a histogram.
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens per iteration, prompt plus output. Counted by the group's leader.",
            labels=LABELS,
        )
        labels = (self._model_name, self._worker_id)
        _add(tokens, labels, self._engine.report.iteration_tokens, ITERATION_TOKENS)
        return tokens

    def _memory(self) -> Iterable[Metric]:
        facts, report = self._facts, self._engine.report
        load, parameters = report.load, report.parameter_bytes
        gauges = {
            "budget_bytes": ("Device memory budget.", facts.budget_bytes),
            "parameter_bytes": (
                "Device memory of parameters; less while layers are dropped.",
                parameters,
            ),
            "kv_bytes": (
                "Device memory available for KV blocks: the arena less the parameters.",
                max(0, facts.arena_bytes - parameters),
            ),
            "staging_bytes": ("Device memory reserved for staging.", facts.staging_bytes),
            "arena_bytes": ("Device memory for parameters plus KV.", facts.arena_bytes),
            "kv_blocks_free": ("Free KV blocks.", load.kv_blocks_free),
            "kv_blocks_total": ("All KV blocks.", load.kv_blocks_total),
            "kv_blocks_wanted": (
                "KV blocks that waiting requests need in order to start.",
                load.kv_blocks_wanted,
            ),
            "kv_blocks_batch": (
                "KV blocks of running batch requests.",
                load.kv_blocks_batch,
            ),
            "host_bytes": ("Host memory of copies of KV.", report.host.host_bytes),
            "host_blocks_total": (
                "KV blocks that host memory has room for so far.",
                load.host_blocks_total,
            ),
            "host_blocks_owed": (
                "KV blocks in host memory that preempted requests need.",
                report.host.host_blocks_owed,
            ),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(name, text, value)

    def _state(self) -> Iterable[Metric]:
        engine, report, place = self._engine, self._engine.report, self._place()
        yield self._gauge(
            "engine_responsive",
            "1 while the engine process sends heartbeats within `engine_unready_s`.",
            engine.responsive,
        )
        yield self._gauge(
            "engine_silence_seconds",
            "Seconds since the engine's last report; it sends none during an iteration.",
            engine.silent_s,
        )
        yield self._gauge("epoch", "Epoch of the engine's current configuration.", report.epoch)
        yield self._gauge(
            "in_merged_group",
            "1 while the worker serves in a group with other workers.",
            place is not None and place.shared,
        )
        yield self._cost_model(report.cost_model)
        seconds = asdict(report.stage) | asdict(report.iterations)
        for field, (name, text) in WORKER_TIMES.items():
            counter = CounterMetricFamily(f"tideserve_worker_{name}", text, labels=_LABELS)
            counter.add_metric((self._worker_id, self._model_name), seconds[field])
            yield counter
        yield from self._class_tokens()
        yield self._restored_slabs()
        yield from self._counters(MOVED_REQUESTS, asdict(report.shipments))
        yield from self._counters(HOST_COPIES, asdict(report.host))
        counts = asdict(engine.report.load)
        yield from self._counters(SHARED_TAILS, counts)
        for name, text in INTERRUPTIONS.items():
            counter = CounterMetricFamily(f"tideserve_worker_{name}", text, labels=_LABELS)
            counter.add_metric((self._worker_id, self._model_name), counts[f"{name}_total"])
            yield counter

    def _cost_model(self, origin: str) -> Metric:
        info = GaugeMetricFamily(
            "tideserve_worker_cost_model_info",
            "Origin of the cost model, always 1: paced, profile (stored), start (measured at the"
            " start), idle (measured while idle), load (refined under load), or none (see"
            " the worker's status).",
            labels=(*_LABELS, "origin"),
        )
        if origin:
            # The reason for none is in the worker's log and in its status.
            name = origin.partition(":")[0]
            info.add_metric((self._worker_id, self._model_name, name), 1)
        return info

    def _deadlines(self) -> Iterable[Metric]:
        """What batch work may use of the time before deadlines, and how it yields."""
        use, labels = self._engine.report.deadlines, (self._worker_id, self._model_name)
        yield self._gauge("harvest_share", HARVEST_SHARE, use.harvest_share)
        for name, seconds in (("budget", use.budget_s), ("budget_used", use.budget_used_s)):
            counter = CounterMetricFamily(
                f"tideserve_worker_{name}_seconds", BUDGETS[name], labels=_LABELS
            )
            counter.add_metric(labels, seconds)
            yield counter
        missed = CounterMetricFamily(
            "tideserve_worker_missed_deadlines",
            MISSED_DEADLINES,
            labels=(*_LABELS, "class", "metric"),
        )
        for metric, counts in (("ttft", use.missed_ttft), ("tpot", use.missed_tpot)):
            for kind in (ServiceClass.INTERACTIVE, ServiceClass.STANDARD):
                missed.add_metric((*labels, kind, metric), counts.get(kind, 0))
        yield missed
        preemption = HistogramMetricFamily(
            "tideserve_worker_preemption_seconds", PREEMPTION, labels=_LABELS
        )
        _add(preemption, labels, self._engine.report.preemption_s, PREEMPTION_S)
        yield preemption

    def _adapters(self) -> Iterable[Metric]:
        use = self._engine.report.load.adapter_use
        yield self._gauge("adapter_slots", "Slots for LoRA adapters.", use.adapter_slots)
        yield self._gauge(
            "adapters_loaded", "Slots that hold a loaded LoRA adapter.", use.adapters_loaded
        )
        for name, text in ADAPTER_LOADS.items():
            counter = CounterMetricFamily(f"tideserve_worker_{name}", text, labels=_LABELS)
            total = getattr(use, f"{name}_total")
            counter.add_metric((self._worker_id, self._model_name), total)
            yield counter

    def _class_tokens(self) -> Iterable[Metric]:
        counts = asdict(self._engine.report.load.tokens)
        for counter_name, text in CLASS_TOKENS.items():
            counter = CounterMetricFamily(
                f"tideserve_worker_{counter_name}_tokens", text, labels=(*_LABELS, "class")
            )
            for kind in ("online", "batch"):
                labels = (self._worker_id, self._model_name, kind)
                counter.add_metric(labels, counts[f"{kind}_{counter_name}_tokens_total"])
            yield counter

    def _counters(
        self, texts: Mapping[str, tuple[str, str]], counts: Mapping[str, float]
    ) -> Iterable[Metric]:
        for field, (name, text) in texts.items():
            counter = CounterMetricFamily(f"tideserve_worker_{name}", text, labels=_LABELS)
            counter.add_metric((self._worker_id, self._model_name), counts[field])
            yield counter

    def _restored_slabs(self) -> Metric:
        counter = CounterMetricFamily(
            "tideserve_worker_restored_slabs", RESTORED_SLABS, labels=(*_LABELS, "source")
        )
        for source in SLAB_SOURCES:
            labels = (self._worker_id, self._model_name, source)
            counter.add_metric(labels, self._engine.report.restored_slabs.get(source, 0))
        return counter

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"tideserve_worker_{name}", text, labels=_LABELS)
        gauge.add_metric((self._worker_id, self._model_name), value)
        return gauge


def _add(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    values: Histogram,
    upper_bounds: Sequence[float],
) -> None:
    counts = values.counts or [0] * (len(upper_bounds) + 1)
    family.add_metric(labels, cumulative(upper_bounds, counts), values.total)
