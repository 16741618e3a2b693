"""`tideserve simulate --against`: simulate a `tideserve bench` result and compare both.

The load is regenerated from the options in the result; instances, KV blocks and limits are those of
the measured cluster. Nothing is fitted to the result: times come from the device profile.

A profile ignores what else the host runs while it serves. `--calibrate` therefore takes a result in
which workers compared iteration times with the predictions: under the same load if the result has
it, else over all loads. It may be the simulated result itself: each system is then scaled by the
other systems.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import orjson
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.co_serving.bars import BATCH, ONLINE, at
from benchmarks.errors import BenchError
from benchmarks.scenarios.scenario import Case, LoadChoice, find_scenario
from benchmarks.systems.catalog import dtype_of
from benchmarks.systems.schedulings import serves_batch
from services.common.config import from_mapping
from services.common.device_profile import DeviceProfile, load_profile
from services.common.errors import ConfigError
from services.common.setting import settings_of
from services.core.overload.events import OverloadConfig, OverloadPolicy
from services.core.planner.config import IterationConfig
from services.core.scheduler.state_config import StateConfig
from services.core.service import Service, ServiceClass
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from tideserve.cli.cache import PROFILES, cache_root
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, unusable
from tideserve.cli.report import Report
from tideserve.cli.simulate import check_writable
from tideserve.load.traces import TraceError
from tideserve.load.workload import PlannedRequest
from tideserve.load.workload import Workload as Requests
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.cluster import DRAIN_S, Cluster, ClusterSpec
from tideserve.sim.delays import Delays
from tideserve.sim.network import LinkSpec
from tideserve.sim.report import Outcomes, class_figures, pooled_figures
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import Arrival, ClosedLoop, CoServed, OpenLoop, Workload

T = TypeVar("T")
DIFFERENCE_MAX = 0.15
ONE_HOST = LinkSpec(bytes_per_s=5e8, latency_s=0.001, piece_bytes=1 << 20)
"""Between workers that share two processors, measured by `tideserve bench drop`."""
BUSY_HOST = Delays(ask_s=0.003, start_s=0.002, token_s=0.0035)
"""Between services on busy processors: measured beside two workers on two cores.

The client sent 1.2 ms late (median); the fastest request reached the engine after 3.6 ms, and a
token took 3.3 to 3.9 ms back (median).
"""
METRICS = {
    "TTFT p50": at("ttft_s", "p50"),
    "TPOT p50": at("tpot_s", "p50"),
    "output tokens/s": at("throughput_tokens_per_s"),
}
CLASS_METRICS = {
    "online TTFT p50": at(*ONLINE, "ttft_s", "p50"),
    "online TTFT p99": at(*ONLINE, "ttft_s", "p99"),
    "online gap p99": at(*ONLINE, "inter_token_s", "p99"),
    "online tokens/s": at(*ONLINE, "processed_tokens_per_s"),
    "batch tokens/s": at(*BATCH, "processed_tokens_per_s"),
}
"""For a load with a backlog of batch requests; tokens are those processed by workers."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured system under a load."""

    case: Case
    system: str
    figures: Mapping[str, Any]
    description: Mapping[str, Any]
    rounds: int
    workers: int
    window_from_s: float = 0.0

    @property
    def token_group(self) -> int:
        """Tokens over which the gateway averages the TPOT target of online requests."""
        classes = self.description["options"].get("gateway", {}).get("classes", {})
        return int(classes.get("interactive", {}).get("token_group", 1))

    @property
    def policy(self) -> OverloadPolicy:
        """Its overload policy."""
        policy = self.description["options"].get("overload_policy") or OverloadConfig().policy
        return OverloadPolicy(policy)

    @property
    def merges(self) -> bool:
        """Whether the overload policy may merge its workers."""
        return self.policy not in (OverloadPolicy.RECOMPUTE, OverloadPolicy.SWAP)


@dataclass(frozen=True, slots=True)
class CostScale:
    """Measured iteration time over the profile's prediction, by phase."""

    prefill: float = 1.0
    decode: float = 1.0


def run_against(
    path: Path, profile: str | None, calibrate: Path | None, json_path: Path | None
) -> None:
    """Simulate each tideserve system of the result at `path` and print both. Raises CommandError.

    `profile` names the device; None selects the profile that `tideserve profile` stored for the
    model. `calibrate` is a result with measured-over-predicted iteration times; None keeps the
    profile's times. If it is the result at `path` itself, a system is scaled by the other systems.
    """
    check_writable(json_path)
    report = Report()
    rows: list[dict[str, Any]] = []
    try:
        with unusable(BenchError, TraceError, ConfigError):
            result = _read(path)
            other = None if calibrate is None else _read(calibrate)
            device = _device(result["config"], profile)
            with report.step(f"Simulating what {path.name} measured, on {device.name}"):
                for measured in _measured(result):
                    paced = measured.description["paced"]
                    if measured.merges and paced:
                        report.line(
                            f"skipping {measured.system}: it is paced to the times of another"
                            " model, so a merge frees a different share of its memory than on the"
                            " modelled device"
                        )
                        continue
                    scale = CostScale()
                    if calibrate is not None and other is not None:
                        without = measured.system if calibrate.samefile(path) else None
                        scale = _scale_of(other, measured.case.name, calibrate, without)
                        whose = "" if without is None else f" of systems other than {without}"
                        report.line(
                            f"{measured.case.name}: in {calibrate.name}, iterations{whose} took"
                            f" {scale.prefill:.2f} (prefill) and {scale.decode:.2f} (decode) times"
                            " as long as the profile predicts"
                        )
                    # A paced system already keeps to the times of its profile.
                    rows += compare(measured, load_profile(paced) if paced else device, scale)
    except (KeyError, TypeError) as error:
        raise CommandError(
            f"{path} is not a result of this version of 'tideserve bench': {error}", EXIT_UNUSABLE
        ) from error
    if not rows:
        raise CommandError(f"{path} has no tideserve system that ran", EXIT_UNUSABLE)
    show(rows, Console(highlight=False))
    if json_path is not None:
        written = {"scenario": result["scenario"], "device": device.name, "compared": rows}
        try:
            json_path.write_bytes(orjson.dumps(written, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise CommandError(f"cannot write {json_path}: {error.strerror}") from error


def compare(measured: Measured, profile: DeviceProfile, scale: CostScale) -> list[dict[str, Any]]:
    """Each metric as measured and as simulated; `difference` is a share of the measured value."""
    simulated = simulate(measured, profile, scale)
    rows = []
    # With a backlog, figures over both classes would mix latencies of different meaning.
    metrics = METRICS if measured.case.backlog is None else CLASS_METRICS
    for name, read in metrics.items():
        real, made_up = read(measured.figures), read(simulated)
        rows.append(
            {
                "load": measured.case.name,
                "system": measured.system,
                "metric": name,
                "measured": real,
                "simulated": made_up,
                "difference": made_up / real - 1 if real and made_up else None,
                "cost_scale": asdict(scale),
            }
        )
    return rows


def simulate(measured: Measured, profile: DeviceProfile, scale: CostScale) -> dict[str, Any]:
    """Figures pooled over the measured number of rounds; a paced system is not scaled."""
    if measured.description["paced"]:
        scale = CostScale()
    spec = _spec(measured, profile)
    time_model = CostTimeModel(
        profile.model, prefill_scale=scale.prefill, decode_scale=scale.decode
    )
    rounds: list[Outcomes] = []
    for turn in range(measured.rounds):
        made = measured.case.workload(turn)
        outcomes = Cluster(spec, time_model, _workload(measured, made, turn)).run()
        rounds.append(replace(outcomes, records=outcomes.records[made.lead_in :]))
    return pooled_figures(rounds) | class_figures(rounds)


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the rows as a table."""
    table = Table(box=SIMPLE, header_style="dim", padding=(0, 1, 0, 0))
    for column in ("load", "system", "", "measured", "simulated", "difference"):
        table.add_column(column, justify="left" if column in ("load", "system", "") else "right")
    for row in rows:
        unit = "" if "/s" in row["metric"] else " s"
        table.add_row(
            *(row["load"], row["system"], row["metric"]),
            *(f"{row[key]:.3g}{unit}" if row[key] else "–" for key in ("measured", "simulated")),
            f"{row['difference']:+.0%}" if row["difference"] is not None else "–",
        )
    console.print(table)
    known = [row["difference"] for row in rows if row["difference"] is not None]
    agree = sum(abs(difference) <= DIFFERENCE_MAX for difference in known)
    console.print(f"{agree} of {len(rows)} figures agree within {DIFFERENCE_MAX:.0%}.")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        result = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(result, dict) or not {"scenario", "config", "systems"} <= result.keys():
        raise ConfigError(f"{path} is not a result of 'tideserve bench'")
    return result


def _scale_of(
    result: Mapping[str, Any], load: str, path: Path, without: str | None = None
) -> CostScale:
    """The mean over the unpaced tideserve systems, except the system `without`.

    Raises:
        ConfigError: if there are none.
    """
    sections = result.get("scenarios") or {result["scenario"]: result}
    scales = [
        figures["cost_scale"]
        for system, figures in sections.get(load, result)["systems"].items()
        if "cost_scale" in figures
        and system != without
        and dtype_of(system) is None
        and not result["config"]["systems"][system].get("paced")
    ]
    means = []
    for phase in ("prefill", "decode"):
        known = [scale[phase] for scale in scales if scale[phase] is not None]
        if not known:
            raise ConfigError(
                f"{path} has no measured-over-predicted iteration times"
                + (f" of systems other than {without}" if without else "")
                + ": store a profile for the model and dtype with 'tideserve profile', then run the"
                " benchmark again"
            )
        means.append(sum(known) / len(known))
    return CostScale(*means)


def _device(config: Mapping[str, Any], profile: str | None) -> DeviceProfile:
    if profile is not None:
        return load_profile(profile)
    wanted = f"{config['model']}, cpu, {config['dtype']}, "
    stored = map(load_profile, sorted((cache_root() / PROFILES).glob("*.yaml")))
    fitting = [candidate for candidate in stored if candidate.name.startswith(wanted)]
    if len(fitting) != 1:
        remedy = f"run 'tideserve profile --dtype {config['dtype']}' first"
        raise ConfigError(
            f"{len(fitting)} stored profiles match {wanted.removesuffix(', ')};"
            f" {'choose with --profile' if fitting else remedy}"
        )
    return fitting[0]


def _measured(result: Mapping[str, Any]) -> Iterator[Measured]:
    config = result["config"]
    scenario, choice = find_scenario(result["scenario"]), LoadChoice(**config["load"])
    cases = scenario.cases(choice)
    window_from_s = scenario.co_serving.load(choice).window_from_s if scenario.co_serving else 0.0
    sections = result.get("scenarios") or {cases[0].name: result}
    for case in cases:
        stated = config.get("workload", {}).get(case.name)
        if stated not in (None, case.workload(0).statement):
            raise ConfigError(
                f"this version of tideserve generates another load for {case.name} than the"
                " measured version, so the figures cannot be compared; measure again"
            )
        for system, figures in sections.get(case.name, {}).get("systems", {}).items():
            description = config["systems"].get(system, {})
            # The device profile was measured in the run's dtype.
            if description.get("kind") == "tideserve" and dtype_of(system) is None:
                rounds = len(figures["rounds"])
                yield Measured(
                    case, system, figures, description, rounds, config["workers"], window_from_s
                )


def _spec(measured: Measured, profile: DeviceProfile) -> ClusterSpec:
    options = measured.description["options"]
    block_size = options["block_size"]
    # The measured capacity is the total over all workers.
    blocks = measured.description["kv_capacity_tokens"] // measured.workers // block_size
    limits = _default_values(WorkerConfig) | options | options["worker"]
    iteration = replace(
        _settings(IterationConfig, limits, block_size=block_size),
        num_blocks=blocks,
        cost_model=profile.model,
        prefix_caching=False,
    )
    queue = _default_values(SchedulerConfig) | (options.get("scheduler") or {})
    scheduling = {"scheduling": limits["scheduling"]}
    scheduler = _settings(
        StateConfig, queue | scheduling, queue_deadline_s=options["queue_deadline"]
    )
    case = measured.case
    # With a backlog the measured round is cut off at its limit, so the simulation drains as long.
    last_s = case.workload(0).requests[-1].arrival_s
    return ClusterSpec(
        instances=measured.workers,
        iteration=iteration,
        max_model_len=blocks * block_size,
        scheduler=scheduler,
        delays=BUSY_HOST,
        fast_forward=False,
        drain_s=DRAIN_S if case.backlog is None else case.limit_s - last_s,
        change=_change(profile, blocks * block_size, measured) if measured.merges else None,
    )


def _default_values(config: type[Any]) -> dict[str, Any]:
    return {key: setting.default for key, setting in settings_of(config).items()}


def _settings(cls: type[T], values: Mapping[str, Any], **more: Any) -> T:
    """A core config from the values that name its settings. Raises ConfigError."""
    own = settings_of(cls).keys() & values.keys()
    return from_mapping(cls, {key: values[key] for key in own} | more, "the result")


def _change(profile: DeviceProfile, kv_tokens: int, measured: Measured) -> ChangeSpec:
    """Change-over costs for workers with `kv_tokens` each on one host. Raises ConfigError."""
    options = measured.description["options"]
    memmgr, limits = options.get("memmgr") or {}, options.get("worker") or {}
    monitor = {
        setting.name: memmgr[setting.name]
        for setting in fields(OverloadConfig)
        if setting.name in memmgr
    }
    shape = profile.shape
    if shape is None or profile.hidden_bytes is None:
        raise ConfigError(
            f"{profile.name} has no layer size, which merges depend on; run 'tideserve profile'"
            " again"
        )
    # A simulated worker has the measured KV capacity in addition to a full copy of the parameters.
    kv_bytes = kv_tokens * shape.kv_bytes * shape.num_layers
    return ChangeSpec(
        shape,
        shape.parameter_bytes(1) + kv_bytes,
        profile.hidden_bytes,
        monitor=OverloadConfig(policy=measured.policy, **monitor),
        link=replace(ONE_HOST, coordinated=limits.get("coordinated_exchange", True)),
    )


def _workload(measured: Measured, made: Requests, turn: int) -> Workload:
    case = measured.case
    arrivals = [_arrival(request, measured.token_group) for request in made.requests]
    if case.backlog is not None:
        backlog = case.backlog(turn)
        requests = (_arrival(backlog.request(number)) for number in count())
        clients = backlog.clients if serves_batch(measured.system) else 0
        batch = ClosedLoop(requests, clients, in_batches=backlog.in_batches)
        return CoServed(OpenLoop(arrivals), batch, measured.window_from_s)
    if case.concurrency is None:
        return OpenLoop(arrivals)
    return ClosedLoop(iter(arrivals), case.concurrency)


def _arrival(request: PlannedRequest, token_group: int = 1) -> Arrival:
    service = Service(ServiceClass(request.slo_class), request.ttft_s, request.tpot_s, token_group)
    return Arrival(
        request.arrival_s, len(request.prompt_ids), request.output_tokens, service=service
    )
