"""Service classes in a simulation: sections `service`, `batch` and `systems` of its file.

`service` is the SLO of the requests of `workload`: `slo_class`, `ttft_s`, `tpot_s` and
`token_group`. With `targets_of`, the name of a system in the file, the targets of all later systems
are the P99 time to first token and P99 gap between tokens of that system (ConServe §6.2).

`batch` is a backlog of batch requests beside `workload` that never runs empty: each of `clients`
sends its next request when its last has ended; with `in_batches`, when the requests of all clients
have ended. `prompt` and `output` are token counts, or `least` and `most` of a uniform distribution.
Processed tokens are counted from `window_from_s` on.

`systems` compares systems that differ in some keys, or in keys of sections, under the same load.
`loads` repeats the comparison for several loads that differ in keys of `workload`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.core.service import Service, ServiceClass
from services.core.setting import choice, number
from tideserve.cli.simulated_workload import SECONDS_MAX
from tideserve.sim.workload import Arrival, ClosedLoop, CoServed, OpenLoop, UniformLength, Workload

ONLINE_CLASSES = (ServiceClass.STANDARD.value, ServiceClass.INTERACTIVE.value)
COMMON_KEYS = frozenset(
    {"systems", "loads", "seed", "duration_s", "overload_policy"}
    | {"profile", "cost", "iteration_overhead_s"}
)
"""Keys that all systems of a file share: time, device and random seed."""


@dataclass(frozen=True, slots=True)
class ServiceSection:
    """SLO of online requests; times in seconds."""

    slo_class: str = choice(ServiceClass.STANDARD.value, ONLINE_CLASSES)
    ttft_s: float | None = number(None, minimum=0.001, maximum=3600)
    tpot_s: float | None = number(None, minimum=0.001, maximum=3600)
    token_group: int = number(1, minimum=1, maximum=1024)
    targets_of: str | None = None

    @property
    def service(self) -> Service:
        """The section as the SLO of a request."""
        service_class = ServiceClass(self.slo_class)
        return Service(service_class, self.ttft_s, self.tpot_s, self.token_group)

    def __post_init__(self) -> None:
        if self.targets_of is not None and (self.ttft_s or self.tpot_s):
            raise ConfigError("section 'service' gives both 'targets_of' and targets; take one out")


@dataclass(frozen=True, slots=True)
class _Span:
    least: int = number(minimum=1, maximum=1_000_000)
    most: int = number(minimum=1, maximum=1_000_000)


@dataclass(frozen=True, slots=True)
class BatchSection:
    """A backlog of batch requests beside `workload`; see the module's docstring."""

    prompt: _Span | int
    output: _Span | int
    clients: int = number(minimum=0, maximum=100_000)
    window_from_s: float = number(15.0, minimum=0, maximum=SECONDS_MAX)
    in_batches: bool = False


def with_classes(
    load: Workload, service: Service, batch: BatchSection | None, seed: int, path: Path
) -> Workload:
    """The load with an SLO and the backlog of section `batch`. Raises ConfigError."""
    load = served_as(load, lambda _: service)
    if batch is None:
        return load
    if not isinstance(load, OpenLoop):
        raise ConfigError(
            f"{path} has a section 'batch' beside a closed loop of clients; choose a 'workload'"
            " with an open loop of arrivals"
        )
    prompt, output = _length(batch.prompt, path), _length(batch.output, path)
    backlog = _backlog(prompt, output, Random(f"batch {seed}"))
    clients = ClosedLoop(backlog, batch.clients, in_batches=batch.in_batches)
    return CoServed(load, clients, batch.window_from_s)


def _backlog(prompt: UniformLength, output: UniformLength, rng: Random) -> Iterator[Arrival]:
    """Endless batch requests."""
    service = Service(ServiceClass.BATCH)
    while True:
        yield Arrival(0.0, prompt.draw(rng), output.draw(rng), service=service)


def _length(span: _Span | int, path: Path) -> UniformLength:
    source = f"section 'batch' of {path}"
    if isinstance(span, int):
        span = from_mapping(_Span, {"least": span, "most": span}, f"a length in {source}")
    if span.least > span.most:
        raise ConfigError(f"a length in {source} has 'least' above 'most'")
    return UniformLength(span.least, span.most)


def with_targets(load: Workload, ttft_s: float, tpot_s: float) -> Workload:
    """The load with other targets for its online requests."""
    return served_as(load, lambda slo: replace(slo, ttft_s=ttft_s, tpot_s=tpot_s))


def served_as(load: Workload, change: Callable[[Service], Service]) -> Workload:
    """The load with `change` applied to the SLO of its online requests."""

    def changed(arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        return (arrival._replace(service=change(arrival.service)) for arrival in arrivals)

    match load:
        case OpenLoop(arrivals=arrivals):
            return OpenLoop(list(changed(iter(arrivals))))
        case ClosedLoop(requests=requests):
            return replace(load, requests=changed(requests))
        case CoServed(online=online):
            return replace(load, online=OpenLoop(list(changed(iter(online.arrivals)))))


def by_load(data: Mapping[str, Any], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and complete file of each of `loads`; ("", file) without `loads`.

    Raises ConfigError.
    """
    loads, workload = data.get("loads") or {"": {}}, data.get("workload")
    if not isinstance(workload, Mapping):
        loads = {"": {}}  # rejected by `workload_of`
    if not isinstance(loads, Mapping) or not all(isinstance(o, Mapping) for o in loads.values()):
        raise ConfigError(f"'loads' in {path} must map names to keys of 'workload' that differ")
    for name, given in loads.items():
        own = {"workload": {**workload, **given}} if isinstance(workload, Mapping) else {}
        yield name, {**data, **own}


def differing(
    base: Mapping[str, Any], systems: Mapping[str, Mapping[str, Any]], path: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and complete file of each of `systems`. Raises ConfigError."""
    for name, given in systems.items():
        if not isinstance(given, Mapping):
            raise ConfigError(f"system '{name}' in {path} must be a mapping of keys that differ")
        common = sorted(COMMON_KEYS & given.keys())
        if common:
            raise ConfigError(
                f"system '{name}' in {path} sets '{common[0]}', which all systems share; move it"
                " to the top of the file"
            )
        whole = {key: value for key, value in base.items() if key not in ("systems", "loads")}
        for key, value in given.items():
            within = isinstance(value, Mapping) and isinstance(whole.get(key), Mapping)
            whole[key] = {**whole[key], **value} if within else value
        yield name, whole
