"""Simulations of BucketServe's evaluation: its engine, and those that it is compared with.

The paper's engines are simulated: prompts of an iteration are padded to the longest, and UELLM runs
static batches. Its data sets are replaced by log-normal lengths with their means, cut to the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from time import perf_counter

from services.common.device_profile import DeviceProfile
from services.core.cost.padded import Execution
from services.core.overload.events import OverloadConfig, OverloadPolicy
from services.core.overload.roles import RoleSetting
from services.core.planner.config import IterationConfig
from services.core.queue_order import Scheduling
from services.core.scheduler.bucket_bounds import SAFE_SHARE
from services.core.scheduler.buckets import Bucketed, Bucketing, BucketOrder, BucketSort
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.state_config import StateConfig
from tideserve.cli.papers.runs import LengthMix, PageRun
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.network import LinkSpec
from tideserve.sim.report import Outcome, Record
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import ClosedLoop, Length, OpenLoop, Workload, gamma_times

DEVICE, INSTANCES = "A100-40G-13B", 4
SHARED = RoleSetting()
"""All instances run both phases."""
APART = RoleSetting(prefill=2, decode=2)
"""Of these, for prompts and for answers, as in the paper: 2P+2D."""
PLACEMENTS = tuple(RoleSetting(prefill=n, decode=INSTANCES - n) for n in range(1, INSTANCES))
PLACED_LOAD = 0.8
"""Load with which DistServe's placement is chosen, over the capacity."""
MODEL_LEN, BATCH_TOKENS, RUNNING = 4096, 4096, 256
CLOSED_S, OPEN_S, SETTLED = 120.0, 120.0, 0.25
"""Simulated durations, and the share of them before the measurement."""
SHORT = (Length(83, 0.8, least=8, most=1024), Length(65, 0.8, least=4, most=512))
LONG = (Length(60_000, 1.0, least=1024, most=3500), Length(100, 0.8, least=4, most=512))
ALPACA, LONGBENCH, MIXED = "Alpaca", "LongBench", "Mixed"
SETS: Mapping[str, LengthMix] = {
    ALPACA: LengthMix([(1.0, *SHORT)]),
    LONGBENCH: LengthMix([(1.0, *LONG)]),
    MIXED: LengthMix([(0.8, *SHORT), (0.2, *LONG)]),
}
TARGETS_S = {ALPACA: (1.0, 0.1), MIXED: (10.0, 0.25)}
"""Time to the first token, and per token: not given in the paper."""
FIRST_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Other targets of the first token, for which the loads are compared."""
CLIENTS = (32, 128, 512, 1024)
LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
"""Arrivals as multiples of what `TIDESERVE` completes in a closed loop."""
ATTAINED = 0.8
PLANNED = 1024
"""Requests whose order is planned to measure the time of a plan."""
BUCKETSERVE, DISTSERVE = "BucketServe", "DistServe-like"
UELLM, TIDESERVE = "UELLM-like", "tideserve"


@dataclass(frozen=True, slots=True)
class PaperEngine:
    """A simulated system."""

    execution: Execution
    buckets: Bucketing
    scheduling: Scheduling


ENGINES: Mapping[str, PaperEngine] = {
    BUCKETSERVE: PaperEngine(Execution.PADDED, Bucketing.PAPER, Scheduling.PREFILL_FIRST),
    DISTSERVE: PaperEngine(Execution.PADDED, Bucketing.OFF, Scheduling.PREFILL_FIRST),
    UELLM: PaperEngine(Execution.STATIC, Bucketing.OFF, Scheduling.FCFS),
    TIDESERVE: PaperEngine(Execution.RAGGED, Bucketing.ON, Scheduling.FCFS),
}


def _simulate(
    device: DeviceProfile, engine: PaperEngine, load: Workload, roles: RoleSetting = SHARED
) -> list[Record]:
    """What becomes of the requests of a load; with `roles`, KV is sent over NVLink."""
    assert device.memory_bytes and device.parameter_bytes and device.kv_bytes_per_token
    size = IterationConfig().block_size
    free_bytes = 0.9 * device.memory_bytes - device.parameter_bytes
    iteration = IterationConfig(
        num_blocks=int(free_bytes / (size * device.kv_bytes_per_token)),
        max_batch_tokens=BATCH_TOKENS,
        max_running=RUNNING,
        cost_model=device.model,
        scheduling=engine.scheduling,
        execution=engine.execution,
        # Hand-overs send KV from cache to cache. No two prompts are alike.
        prefix_caching=not roles.off,
    )
    rules = ClassRules(engine.scheduling, buckets=engine.buckets, batch_order=BucketSort.FIFO)
    scheduler = StateConfig(
        *(100_000, 36_000.0),
        ttft=device.model,
        rules=rules,
        lateness=0.0,
        hand_over_min_tokens=1,
    )
    spec = ClusterSpec(INSTANCES, iteration, MODEL_LEN, scheduler, drain_s=OPEN_S)
    if not roles.off:
        spec = replace(spec, change=_apart(device, roles, iteration))
    return Cluster(spec, CostTimeModel(device.model), load).run().records


def _apart(device: DeviceProfile, roles: RoleSetting, iteration: IterationConfig) -> ChangeSpec:
    """Prompts and answers on different instances, connected by NVLink."""
    shape = device.shape
    assert shape is not None and device.hidden_bytes and device.peer_link_bytes_per_s
    kv_bytes = iteration.num_blocks * iteration.block_size * shape.num_layers * shape.kv_bytes
    return ChangeSpec(
        shape,
        shape.parameter_bytes(1) + kv_bytes,
        device.hidden_bytes,
        OverloadConfig(policy=OverloadPolicy.RECOMPUTE),
        link=LinkSpec(bytes_per_s=device.peer_link_bytes_per_s),
        roles=roles,
    )


Closed = Mapping[str, Mapping[int, tuple[float, float]]]
"""By system and number of clients: tokens and requests per second."""


def closed_rates(device: DeviceProfile, run: PageRun) -> Closed:
    seconds = CLOSED_S * run.factor
    rates: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in ENGINES}
    for name, engine in ENGINES.items():
        for clients in CLIENTS:
            run.step(f"{name}, {clients} clients")
            drawn = SETS[MIXED].drawn(Random(f"closed {run.seed}"))
            records = _simulate(device, engine, ClosedLoop(drawn, clients, seconds))
            rates[name][clients] = _rates(records, SETTLED * seconds, seconds)
    return rates


def _rates(records: Sequence[Record], from_s: float, to_s: float) -> tuple[float, float]:
    """Tokens and requests per second that ended in a window."""
    ended = [r for r in records if r.outcome is Outcome.COMPLETED and from_s <= r.end_s <= to_s]
    tokens = sum(record.prompt_tokens + record.output_tokens for record in ended)
    return tokens / (to_s - from_s), len(ended) / (to_s - from_s)


@dataclass(frozen=True, slots=True)
class Served:
    """Arrivals per second, and what became of them: ends per second, targets met, mean times.

    `within`: shares with their first token within each of `FIRST_S`.
    """

    rate: float
    ended_per_s: float
    attainment: float
    first_s: float
    rest_s: float
    within: Sequence[float] = ()


Loads = Mapping[str, Sequence[Served]]


def open_loads(device: DeviceProfile, kind: str, run: PageRun) -> Loads:
    """What becomes of the requests of a data set, by system; all instances run both phases."""
    capacity = _capacity(device, kind, run)
    return {name: _loads(device, kind, name, capacity, run) for name in ENGINES}


def apart_loads(device: DeviceProfile, kind: str, run: PageRun) -> tuple[Loads, RoleSetting]:
    """The same of BucketServe on 2P+2D, and of DistServe on the placement that serves it best.

    DistServe simulates its placements with the expected load and chooses by goodput (DistServe §4).
    """
    capacity = _capacity(device, kind, run)
    goodput = {
        roles: _served_load(device, kind, DISTSERVE, PLACED_LOAD, capacity, run, roles).attainment
        for roles in PLACEMENTS
    }
    placement = max(PLACEMENTS, key=lambda roles: goodput[roles])
    return {
        BUCKETSERVE: _loads(device, kind, BUCKETSERVE, capacity, run, APART),
        DISTSERVE: _loads(device, kind, DISTSERVE, capacity, run, placement),
    }, placement


def _capacity(device: DeviceProfile, kind: str, run: PageRun) -> float:
    """Requests per second that the engine without padding completes in a closed loop."""
    seconds = OPEN_S * run.factor
    drawn = SETS[kind].drawn(Random(f"capacity {run.seed}"))
    closed = _simulate(device, ENGINES[TIDESERVE], ClosedLoop(drawn, max(CLIENTS), seconds))
    return _rates(closed, SETTLED * seconds, seconds)[1]


def _loads(
    device: DeviceProfile,
    kind: str,
    name: str,
    capacity: float,
    run: PageRun,
    roles: RoleSetting = SHARED,
) -> list[Served]:
    return [_served_load(device, kind, name, share, capacity, run, roles) for share in LOADS]


def _served_load(
    device: DeviceProfile,
    kind: str,
    name: str,
    share: float,
    capacity: float,
    run: PageRun,
    roles: RoleSetting,
) -> Served:
    """What becomes of a load of `share` times the capacity."""
    run.step(f"{kind}, {name}{placement_text(roles)}, {share:g} × the capacity")
    seconds, rate = OPEN_S * run.factor, share * capacity
    times, rng = (Random(f"{what} {kind} {run.seed}") for what in ("times", "lengths"))
    load = OpenLoop(SETS[kind].arriving(gamma_times(rate, 1.0, seconds, times), rng))
    records = _simulate(device, ENGINES[name], load, roles)
    return _served(records, rate, seconds, TARGETS_S[kind])


def placement_text(roles: RoleSetting) -> str:
    """The numbers of instances for prompts and for answers, such as " 2P+2D"; "" without roles."""
    return "" if roles.off else f" {roles.prefill}P+{roles.decode}D"


def _served(
    records: Sequence[Record], rate: float, seconds: float, targets: tuple[float, float]
) -> Served:
    from_s = SETTLED * seconds
    sent = [record for record in records if record.sent_s >= from_s]
    done = [record for record in sent if record.outcome is Outcome.COMPLETED]
    met = [r for r in done if r.ttft_s <= targets[0] and (r.tpot_s or 0.0) <= targets[1]]
    firsts = [sum(record.ttft_s <= limit_s for record in done) for limit_s in FIRST_S]
    return Served(
        rate,
        _rates(records, from_s, seconds)[1],
        len(met) / max(1, len(sent)),
        sum(record.ttft_s for record in done) / max(1, len(done)),
        sum(record.e2e_s - record.ttft_s for record in done) / max(1, len(done)),
        [count / max(1, len(sent)) for count in firsts],
    )


def planning_s(buckets: int) -> float:
    """Seconds to plan the order of 1,024 requests in so many buckets."""
    rng = Random(1)
    drawn = SETS[MIXED].drawn(rng)
    lengths = [a.prompt_tokens + a.output_tokens for a in islice(drawn, PLANNED)]
    requests = [Bucketed((0.0, 0.0, float(n)), length, n) for n, length in enumerate(lengths)]
    memory = int(sum(lengths) / (buckets - 0.5) / SAFE_SHARE)
    order, times_s = BucketOrder(Bucketing.ON, BucketSort.FIFO), []
    for _ in range(9):
        began_s = perf_counter()
        order.plan(requests, memory, MODEL_LEN)
        times_s.append(perf_counter() - began_s)
    return min(times_s)


def attained_load(points: Sequence[Served], first: int | None = None) -> float | None:
    """Arrivals per second up to which `ATTAINED` of the targets are met, between points linearly.

    `first`: the index of a target of the first token alone. None if the targets are missed at the
    lowest load.
    """
    shares = [p.attainment if first is None else p.within[first] for p in points]
    last = None
    for index, (point, share) in enumerate(zip(points, shares, strict=True)):
        if share >= ATTAINED:
            last = point.rate
        elif index and shares[index - 1] >= ATTAINED:
            before = points[index - 1].rate
            part = (shares[index - 1] - ATTAINED) / (shares[index - 1] - share)
            return before + part * (point.rate - before)
    return last
