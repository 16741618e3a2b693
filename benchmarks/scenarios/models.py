"""`models`: two models behind one gateway, and behind a gateway each.

Both models have a paced worker, in the cluster of both and in a cluster of their own; block sizes
and tokenizers differ, and every gateway loads the tokenizers of its models. All clusters run
throughout. In turns:

* a closed loop on both models at once: output tokens per second, one gateway over two;
* arrivals at the second model, while the first is idle and while a closed loop keeps requests
  queued for it: P99 TTFT, flooded over alone, behind the shared gateway. Behind two gateways, the
  same ratio shows what the flood costs a model that shares only the machine.

Workers and clients of the first model run on one half of the cores, those of the second on the
other; gateways and the control plane run on all. Paced engines sleep most of the time. At the end,
the memory of the gateways with all their child processes is read: the resident memory, and for
comparison the private memory, without the pages that processes of a machine share.
"""

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil
import yaml

from benchmarks.client_process import run_answered
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import percentiles
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.cores import child_cores, halves, pin
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.client import Job
from tideserve.load.record import SentRequest
from tideserve.load.workload import PlannedRequest, prompt_ids

NAMES = ("first", "second")
BLOCK_SIZES = {"first": 16, "second": 32}
CORES = dict(zip(NAMES, halves(), strict=True))
ONE, TWO = "one gateway", "two gateways"
PACE = "A100-40G-7B:4"
ROUNDS, QUICK_ROUNDS = 7, 3
CLIENTS = 12
LOOP_REQUESTS, QUICK_LOOP_REQUESTS = 96, 48
PROMPT, OUTPUT = (64, 192), (48, 80)
RATE_PER_S, ARRIVALS_S, QUICK_ARRIVALS_S = 4.0, 60.0, 25.0
SHORT_PROMPT, SHORT_OUTPUT = (32, 96), (8, 16)
FLOOD_CLIENTS = 64
"""More than a worker runs at once, so that the others wait in the scheduler's queue."""
FLOOD_RUNNING_MAX = 32
ROUND_TIMEOUT_S = 300.0
RSS_RATIO_MAX, THROUGHPUT_RATIO_MIN, FLOODED_RATIO_MAX = 0.75, 0.95, 1.25


class SharedGateway(Tideserve):
    """A cluster of both models."""

    def __init__(self, deployment: Deployment, listed: Path) -> None:
        super().__init__(ONE, (), deployment)
        self._listed = listed

    def options(self) -> dict[str, Any]:
        options = super().options()
        for key in ("model", "model_name", "workers", "block_size"):
            del options[key]
        return options | {"models": str(self._listed)}

    @property
    def _block_tokens(self) -> int:
        return min(BLOCK_SIZES.values())


@dataclass(slots=True)
class ModelRecord:
    """What the rounds measured."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {ONE: [], TWO: []})
    # TTFTs by system.
    alone_s: dict[str, list[list[float]]] = field(default_factory=lambda: {ONE: [], TWO: []})
    flooded_s: dict[str, list[list[float]]] = field(default_factory=lambda: {ONE: [], TWO: []})
    resident: dict[str, int] = field(default_factory=dict)
    private: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clusters:
    """The cluster of both models, and those of one each by model."""

    shared: SharedGateway
    alone: Mapping[str, Tideserve]

    def url_of(self, system: str, model: str) -> str:
        """The gateway of a model."""
        return (self.shared if system == ONE else self.alone[model]).urls[0]

    def separate(self) -> None:
        """Run the workers of each model on cores of their own. Raises SystemUnavailable."""
        for system in (self.shared, *self.alone.values()):
            for row in read_status(system.admin_url)["workers"]:
                pin(row["pids"], CORES[row["model"]])

    def note_memory(self, record: ModelRecord) -> None:
        """Read the memory of the gateways, in bytes. Raises SystemUnavailable."""
        shared = gateway_memory(self.shared)
        alone = [gateway_memory(system) for system in self.alone.values()]
        record.resident = {ONE: shared[0], TWO: sum(resident for resident, _ in alone)}
        record.private = {ONE: shared[1], TWO: sum(private for _, private in alone)}


def gateway_memory(system: Tideserve) -> tuple[int, int]:
    """Resident and private bytes of a gateway and its child processes. Raises SystemUnavailable."""
    services = read_status(system.admin_url).get("services", ())
    pids = [int(row["pid"]) for row in services if row["name"] == "gateway"]
    if len(pids) != 1:
        raise SystemUnavailable(f"{system.admin_url} does not report its gateway's process")
    gateway, resident, private = psutil.Process(pids[0]), 0, 0
    for process in (gateway, *gateway.children(recursive=True)):
        # A check of a grammar may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            resident, private = resident + memory.rss, private + memory.uss
    return resident, private


def write_other_tokenizer(model_dir: Path) -> None:
    """Give the tokens of a folder's tokenizer.json other ids.

    The tokenizer takes the same memory, but shares no file and no ids with the first. Added tokens
    keep their ids, which the configuration names.
    """
    path = model_dir / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    kept = {token["content"] for token in added}
    tokens = [token for token in vocabulary if token not in kept]
    ids = sorted((vocabulary[token] for token in tokens), reverse=True)
    vocabulary |= dict(zip(sorted(tokens, key=vocabulary.__getitem__), ids, strict=True))
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def start(deployment: Deployment, folder: Path, say: Say, stack: ExitStack) -> Clusters:
    """Start all clusters; `stack` stops them."""
    folders = {name: folder / name for name in NAMES}
    for model_dir in folders.values():
        shutil.copytree(deployment.model_dir, model_dir)
    write_other_tokenizer(folders[NAMES[1]])
    listed = folder / "models.yaml"
    entries = [
        {"model": str(folders[name]), "name": name, "block_size": BLOCK_SIZES[name]}
        for name in NAMES
    ]
    listed.write_text(yaml.safe_dump({"models": entries}))
    shared = SharedGateway(replace(deployment, workers=len(NAMES)), listed)
    alone = {
        name: Tideserve(
            f"gateway of {name}",
            (),
            replace(
                deployment,
                workers=1,
                model_dir=folders[name],
                model_name=name,
                options={**deployment.options, "block_size": BLOCK_SIZES[name]},
            ),
        )
        for name in NAMES
    }
    for system in (shared, *alone.values()):
        stack.callback(system.stop)
        system.start(say)
    clusters = Clusters(shared, alone)
    clusters.separate()
    return clusters


def closed_loop(model: str, count: int, seed: str) -> tuple[PlannedRequest, ...]:
    """Requests of a closed loop."""
    rng = Random(f"{model} {seed}")
    return tuple(
        PlannedRequest(
            0.0,
            prompt_ids(rng.randint(*PROMPT), f"{model} {seed} {number}"),
            rng.randint(*OUTPUT),
            number,
        )
        for number in range(count)
    )


def arrivals(seconds: float, seed: str) -> tuple[PlannedRequest, ...]:
    """Short requests with Poisson arrivals."""
    rng, requests = Random(seed), list[PlannedRequest]()
    at_s = rng.expovariate(RATE_PER_S)
    while at_s < seconds:
        prompt = prompt_ids(rng.randint(*SHORT_PROMPT), f"{seed} {len(requests)}")
        requests.append(PlannedRequest(at_s, prompt, rng.randint(*SHORT_OUTPUT), len(requests)))
        at_s += rng.expovariate(RATE_PER_S)
    return tuple(requests)


Load = Callable[[], tuple[SentRequest, ...]]


def send(
    url: str, model: str, requests: tuple[PlannedRequest, ...], clients: int | None
) -> tuple[SentRequest, ...]:
    """The records of a load. Raises SystemUnavailable if a request fails."""
    with child_cores(CORES[model]):
        return run_answered(Job((url,), model, requests, ROUND_TIMEOUT_S, clients))


def together(loads: Sequence[Load]) -> list[tuple[SentRequest, ...]]:
    """Run loads at the same time. Raises SystemUnavailable as they do."""
    results: list[tuple[SentRequest, ...] | SystemUnavailable] = [()] * len(loads)

    def run(index: int, load: Load) -> None:
        try:
            results[index] = load()
        except SystemUnavailable as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(loads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, SystemUnavailable):
            raise result
    return [result for result in results if isinstance(result, tuple)]


def measure_throughput(clusters: Clusters, system: str, count: int, seed: str) -> float:
    """Output tokens per second of a closed loop on each model, both at once."""
    loads = [
        partial(send, clusters.url_of(system, model), model, requests, CLIENTS)
        for model in NAMES
        if (requests := closed_loop(model, count, seed))
    ]
    # Each load has its own clock. The models' rates add up: they run at the same time.
    return sum(
        sum(record.output_tokens for record in records)
        / (max(r.end_s for r in records) - min(r.sent_s for r in records))
        for records in together(loads)
    )


def measure_ttfts(
    clusters: Clusters, system: str, seconds: float, seed: str, *, flooded: bool
) -> list[float]:
    """TTFTs of the arrivals at the second model; `flooded`: with a flood at the first."""
    first_url, second_url = (clusters.url_of(system, name) for name in NAMES)
    ending = threading.Event()

    def measured() -> tuple[SentRequest, ...]:
        try:
            return send(second_url, NAMES[1], arrivals(seconds, seed), None)
        finally:
            ending.set()

    def flood() -> tuple[SentRequest, ...]:
        number = 0
        while not ending.is_set():
            requests = closed_loop(NAMES[0], 2 * FLOOD_CLIENTS, f"flood {seed} {number}")
            send(first_url, NAMES[0], requests, FLOOD_CLIENTS)
            number += 1
        return ()

    loads: list[Load] = [measured, flood] if flooded else [measured]
    return [record.ttft_s for record in together(loads)[0]]


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start the clusters and measure."""
    deployment = replace(deployment, paced=deployment.paced or PACE, max_running=FLOOD_RUNNING_MAX)
    rounds = choice.rounds or (QUICK_ROUNDS if choice.quick else ROUNDS)
    count = QUICK_LOOP_REQUESTS if choice.quick else LOOP_REQUESTS
    seconds = QUICK_ARRIVALS_S if choice.quick else ARRIVALS_S
    record = ModelRecord()
    with ExitStack() as stack:
        folder = deployment.model_dir.parent / "models"
        clusters = start(deployment, folder, say, stack)
        for system in (ONE, TWO):
            progress(f"warming up {system}")
            measure_throughput(clusters, system, CLIENTS, f"{choice.seed} warm-up")
        for turn in range(rounds):
            seed = f"{choice.seed} {turn}"
            progress(f"round {turn + 1} of {rounds}: closed loops")
            # Alternate the order, so that drift of the machine affects both.
            for system in sorted((ONE, TWO), reverse=bool(turn % 2)):
                speed = measure_throughput(clusters, system, count, seed)
                record.tokens_per_s[system].append(speed)
            progress(f"round {turn + 1} of {rounds}: arrivals, alone and beside a flood")
            for flooded in sorted((False, True), reverse=bool(turn % 2)):
                for system in sorted((ONE, TWO), reverse=bool(turn % 2)):
                    ttfts = measure_ttfts(clusters, system, seconds, seed, flooded=flooded)
                    (record.flooded_s if flooded else record.alone_s)[system].append(ttfts)
        clusters.note_memory(record)
    return judge(record, str(deployment.paced))


def _p99(values: Sequence[float]) -> float:
    value = percentiles(values)["p99"]
    assert value is not None, "every round has requests"
    return value


def _pooled(rounds: Sequence[Sequence[float]]) -> dict[str, float | None]:
    return percentiles([value for values in rounds for value in values])


def judge(record: ModelRecord, paced: str) -> TrialVerdict:
    """Figures, and a problem for every missed bar. Ratios are medians of the rounds' ratios."""
    speeds, resident, private = record.tokens_per_s, record.resident, record.private
    speed_ratios = [one / two for one, two in zip(speeds[ONE], speeds[TWO], strict=True)]
    ttft_ratios = {
        system: [
            _p99(flooded) / _p99(alone)
            for flooded, alone in zip(rounds, record.alone_s[system], strict=True)
        ]
        for system, rounds in record.flooded_s.items()
    }
    ttfts = {system: median(ratios) for system, ratios in ttft_ratios.items()}
    rss, speed = resident[ONE] / resident[TWO], median(speed_ratios)
    figures = {
        "paced": paced,
        "block_sizes": BLOCK_SIZES,
        "gateway_rss_bytes": resident,
        "gateway_rss_ratio": rss,
        "gateway_private_bytes": private,
        "gateway_private_ratio": private[ONE] / private[TWO],
        "tokens_per_s": speeds,
        "throughput_ratios": speed_ratios,
        "throughput_ratio": speed,
        "ttft_s": {
            system: {"alone": _pooled(record.alone_s[system]), "flooded": _pooled(rounds)}
            for system, rounds in record.flooded_s.items()
        },
        "requests": sum(map(len, record.alone_s[ONE])),
        "flooded_ttft_p99_ratios": ttft_ratios,
        "flooded_ttft_p99_ratio": ttfts,
    }
    least, most = "at least", "at most"
    bars = (
        ("memory of the gateways, one over two", rss, most, RSS_RATIO_MAX),
        ("tokens per second, one over two", speed, least, THROUGHPUT_RATIO_MIN),
        ("P99 TTFT, flooded over alone", ttfts[ONE], most, FLOODED_RATIO_MAX),
    )
    rows = [(what, f"{value:.2f}") for what, value, _, _ in bars]
    rows.append(("the same behind two gateways", f"{ttfts[TWO]:.2f}"))
    problems = [
        f"{what} is {value:.2f}, but must be {side} {bar:g}"
        for what, value, side, bar in bars
        if (value < bar if side == least else value > bar)
    ]
    return TrialVerdict(figures, rows, problems)


SCENARIO = Scenario(
    name="models",
    memory="82MiB",
    paced_memory="82MiB",
    run=run,
    options=frozenset({"paced", "rounds"}),
    tiny_model={"num_hidden_layers": 4, "max_position_embeddings": 4096},
    # Workers of a single group cannot merge.
    up_options={"overload_policy": "recompute"},
)
