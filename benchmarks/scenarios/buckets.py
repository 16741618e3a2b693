"""`buckets`: batch requests of mixed lengths by arrival and by buckets, on engines that pad or not.

A closed loop of batch requests keeps many waiting: 80 % are short, as in Alpaca (83 prompt tokens
on average), the others long, as in LongBench, cut off at 2,000 tokens (BucketServe §V); answers are
short. With long answers, decodes take most of the time, and prompts start one at a time as others
end, so that little is padded and buckets gain less: 1.18 times with 65 tokens. Measured are
processed tokens per second, of workers whose paced iterations last as long as on an engine
that pads prompts (`padded`), as on one that does not (`ragged`), and as with static batches by
arrival (`static`, like UELLM). Bars: with buckets at least 1.3 times the throughput of the order
of arrival if padded, 0.97 times if ragged. `scheduler_share` is the CPU time that buckets add to
the scheduler, over the time of the measurement; at most 1 %.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.scenarios.recovery import EndlessStreams
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import quotient
from benchmarks.systems.schedulings import merged
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from services.common.clock import monotonic_s
from services.core.cost.padded import Execution
from services.core.scheduler.buckets import Bucketing
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.workload import BATCH_CLASS, PlannedRequest, prompt_ids
from tideserve.sim.workload import Length

PACE = "A100-40G-7B:4"
SHORT_SHARE = 0.8
SHORT, LONG = Length(83, 0.8, least=8, most=400), Length(1400, 0.4, least=512, most=2000)
OUTPUT = Length(16, 0.8, least=2, most=64)
"""Short answers, as of a batch that labels or extracts, so that prompts take most of the time."""
CLIENTS_PER_WORKER = 200
"""About ten times as many tokens as the KV of a worker holds."""
QUICK_S, FULL_S, SETTLE_S = 45.0, 240.0, 25.0
PADDED_MIN, RAGGED_MIN, SCHEDULER_MAX = 1.3, 0.97, 0.01
BY_ARRIVAL, BY_BUCKET = "arrival", "buckets"
SYSTEMS = (
    (Execution.PADDED, BY_ARRIVAL),
    (Execution.PADDED, BY_BUCKET),
    (Execution.RAGGED, BY_ARRIVAL),
    (Execution.RAGGED, BY_BUCKET),
    (Execution.STATIC, BY_ARRIVAL),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Throughput of a system; `paced_ratio`: time of iterations over that of the paced device."""

    tokens_per_s: float
    scheduler_share: float
    padding_share: float | None
    paced_ratio: float | None
    capacity_tokens: int | None
    preemptions: int


class MixedLengths(EndlessStreams):
    """Clients with a batch request each at a time, the same requests for every system."""

    def drawn(self, clients: int, seed: int) -> Iterator[PlannedRequest]:
        for number in itertools.count():
            if self._stopped.is_set():
                return
            yield mixed_request(number, seed)


def mixed_request(number: int, seed: int) -> PlannedRequest:
    """Request `number` of the load."""
    rng = Random(f"buckets {seed} {number}")
    short = rng.random() < SHORT_SHARE
    ids = prompt_ids((SHORT if short else LONG).draw(rng), f"buckets {seed} {number}")
    return PlannedRequest(0.0, ids, OUTPUT.draw(rng), number, slo_class=BATCH_CLASS)


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Measure the systems one after another."""
    deployment = replace(deployment, paced=deployment.paced or PACE)
    seconds = QUICK_S if choice.quick else FULL_S
    measured = dict[str, Measured]()
    for execution, order in SYSTEMS:
        name = f"{execution}-{order}"
        buckets = Bucketing.ON if order == BY_BUCKET else Bucketing.OFF
        # Plain strings: the options are written as YAML.
        scheduler, worker = {"buckets": buckets.value}, {"execution": execution.value}
        options = {"scheduler": scheduler, "worker": worker}
        cluster = Tideserve(
            name, (), replace(deployment, options=merged(deployment.options, options))
        )
        try:
            cluster.start(say)
            progress(f"{name}: {SETTLE_S + seconds:.0f} s")
            measured[name] = _measure(cluster, deployment, choice.seed, seconds)
        finally:
            cluster.stop()
        say(f"{name}: {measured[name].tokens_per_s:,.0f} tokens/s")
    return judge(measured, {"paced": deployment.paced, "seconds": seconds})


def _measure(cluster: Tideserve, deployment: Deployment, seed: int, seconds: float) -> Measured:
    """Throughput of a running cluster. Raises SystemUnavailable."""
    clients = CLIENTS_PER_WORKER * deployment.workers
    loop = MixedLengths(cluster.urls[0], cluster.model, clients, seed)
    loop.start()
    try:
        time.sleep(SETTLE_S)
        before, cost, from_s = cluster.counters(), cluster.process_cost(), monotonic_s()
        time.sleep(seconds)
        after, spent = cluster.counters(), cluster.process_cost().since(cost)
        elapsed_s, metrics = monotonic_s() - from_s, cluster.metrics()
    finally:
        loop.stop()
    if before.processed is None or after.processed is None or loop.failures:
        raise SystemUnavailable(f"{cluster.name}: the closed loop failed: {loop.failures[:1]}")
    took, predicted = (
        sum((getattr(after, key) or 0.0) - (getattr(before, key) or 0.0) for key in keys)
        for keys in (("prefill_s", "decode_s"), ("prefill_predicted_s", "decode_predicted_s"))
    )
    return Measured(
        (after.processed - before.processed) / elapsed_s,
        spent.seconds.get("scheduler", 0.0) / elapsed_s,
        metrics.get("tideserve_scheduler_bucket_padding_share"),
        quotient(took, predicted),
        before.capacity_tokens,
        (after.preemptions or 0) - (before.preemptions or 0),
    )


def judge(measured: Mapping[str, Measured], setting: Mapping[str, Any]) -> TrialVerdict:
    """Ratios of buckets to the order of arrival, and the bars that they miss."""

    def rate(execution: Execution, order: str) -> float:
        return measured[f"{execution}-{order}"].tokens_per_s

    padded, ragged = (
        rate(execution, BY_BUCKET) / rate(execution, BY_ARRIVAL)
        for execution in (Execution.PADDED, Execution.RAGGED)
    )
    static = rate(Execution.PADDED, BY_BUCKET) / rate(Execution.STATIC, BY_ARRIVAL)
    scheduler = max(
        measured[f"{execution}-{BY_BUCKET}"].scheduler_share
        - measured[f"{execution}-{BY_ARRIVAL}"].scheduler_share
        for execution in (Execution.PADDED, Execution.RAGGED)
    )
    bars = (
        ("padded throughput", padded, padded >= PADDED_MIN, f"at least {PADDED_MIN} ×"),
        ("ragged throughput", ragged, ragged >= RAGGED_MIN, f"at least {RAGGED_MIN} ×"),
        ("scheduler's share", scheduler, scheduler <= SCHEDULER_MAX, f"at most {SCHEDULER_MAX}"),
    )
    figures = {
        **setting,
        "padded": {"throughput_ratio": padded, "throughput_ratio_to_static": static},
        "ragged": {"throughput_ratio": ragged},
        "scheduler_share": scheduler,
        "systems": {
            name: {field: getattr(of, field) for field in Measured.__dataclass_fields__}
            for name, of in measured.items()
        },
    }
    rows = [(name, f"{value:.3f}; bar: {bar}") for name, value, _, bar in bars]
    rows.append(("padded, over static batches", f"{static:.2f} ×; BucketServe: 3.58 × UELLM"))
    rows += [(name, f"{of.tokens_per_s:,.0f} tokens/s") for name, of in measured.items()]
    problems = [f"{name} is {value:.3f}, not {bar}" for name, value, met, bar in bars if not met]
    return TrialVerdict(figures, rows, problems)


SCENARIO = Scenario(
    name="buckets",
    memory="82MiB",
    paced_memory="82MiB",
    run=run,
    options=frozenset({"paced"}),
    tiny_model={"num_hidden_layers": 4, "max_position_embeddings": 4096},
    # Disable merges, whatever the demand; whole prompts fit into an iteration.
    up_options={"max_batch_tokens": 4096, "overload_policy": "recompute"},
)
