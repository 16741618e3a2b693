"""Reads the load of a simulation: section `workload` of its file, by `kind`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.core.setting import number
from tideserve.load.traces import TraceError, load_trace
from tideserve.load.workload import LengthScale, arrivals_of
from tideserve.sim.workload import (
    AGENTS,
    CHATS,
    Arrival,
    ClosedLoop,
    Length,
    OpenLoop,
    Workload,
    burst_phases,
    gamma_times,
    on_off_phases,
    phased_times,
    with_lengths,
)

TOKENS_MAX = 1_000_000
RATE_MAX = 1e6
SECONDS_MAX = 1e6


@dataclass(frozen=True, slots=True)
class _Gamma:
    rate_per_s: float = number(minimum=1e-6, maximum=RATE_MAX)
    cv: float = number(1.0, minimum=0, maximum=100)
    prompt: dict[str, Any] | int = 512
    output: dict[str, Any] | int = 128
    kind: str = "gamma"


@dataclass(frozen=True, slots=True)
class _OnOff:
    on_rate_per_s: float = number(minimum=1e-6, maximum=RATE_MAX)
    on_s: float = number(minimum=0.001, maximum=SECONDS_MAX)
    off_s: float = number(minimum=0.001, maximum=SECONDS_MAX)
    off_rate_per_s: float = number(0.0, minimum=0, maximum=RATE_MAX)
    prompt: dict[str, Any] | int = 512
    output: dict[str, Any] | int = 128
    kind: str = "on_off"


@dataclass(frozen=True, slots=True)
class _Burst:
    rate_per_s: float = number(minimum=1e-6, maximum=RATE_MAX)
    burst_rate_per_s: float = number(minimum=1e-6, maximum=RATE_MAX)
    start_s: float = number(minimum=0, maximum=SECONDS_MAX)
    end_s: float = number(minimum=0, maximum=SECONDS_MAX)
    cv: float = number(1.0, minimum=0, maximum=100)
    prompt: dict[str, Any] | int = 512
    output: dict[str, Any] | int = 128
    kind: str = "burst"


@dataclass(frozen=True, slots=True)
class _Closed:
    concurrency: int = number(minimum=1, maximum=10**6)
    requests: int | None = number(None, minimum=1, maximum=10**9)
    prompt: dict[str, Any] | int = 512
    output: dict[str, Any] | int = 128
    kind: str = "closed"


@dataclass(frozen=True, slots=True)
class _Chats:
    # Conversations that start per second.
    rate_per_s: float = number(minimum=1e-6, maximum=RATE_MAX)
    kind: str = "chats"


@dataclass(frozen=True, slots=True)
class _Agents:
    rate_per_s: float = number(minimum=1e-6, maximum=RATE_MAX)
    kind: str = "agents"


@dataclass(frozen=True, slots=True)
class _Trace:
    path: Path
    start_s: float = number(0.0, minimum=0, maximum=1e9)
    slice_s: float | None = number(None, minimum=0.001, maximum=1e9)
    rate_per_s: float | None = number(None, minimum=1e-6, maximum=RATE_MAX)
    prompt_scale: float = number(1.0, minimum=1e-6, maximum=1e6)
    output_scale: float = number(1.0, minimum=1e-6, maximum=1e6)
    prompt_least: int = number(1, minimum=1, maximum=TOKENS_MAX)
    prompt_most: int = number(TOKENS_MAX, minimum=1, maximum=TOKENS_MAX)
    output_least: int = number(1, minimum=1, maximum=TOKENS_MAX)
    output_most: int = number(TOKENS_MAX, minimum=1, maximum=TOKENS_MAX)
    kind: str = "trace"


_Section = _Gamma | _OnOff | _Burst | _Closed | _Chats | _Agents | _Trace
KINDS: Mapping[str, type[_Section]] = {
    "gamma": _Gamma,
    "on_off": _OnOff,
    "burst": _Burst,
    "closed": _Closed,
    "chats": _Chats,
    "agents": _Agents,
    "trace": _Trace,
}


@dataclass(frozen=True, slots=True)
class _LengthSection:
    mean: float = number(minimum=1, maximum=TOKENS_MAX)
    cv: float = number(0.0, minimum=0, maximum=100)
    least: int = number(1, minimum=1, maximum=TOKENS_MAX)
    most: int = number(TOKENS_MAX, minimum=1, maximum=TOKENS_MAX)


def workload_of(
    given: Mapping[str, Any], duration_s: float, seed: int, path: Path, notes: list[str]
) -> Workload:
    """The load of section `given` of the file at `path`; appends warnings to `notes`.

    Raises:
        ConfigError: if the section or its trace is invalid.
    """
    source = f"section 'workload' of {path}"
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"'kind' in {source} is {kind!r}, but must be one of {', '.join(KINDS)}")
    section = from_mapping(KINDS[kind], given, source)
    # Separate generators, so that a change of the arrival process keeps the lengths, and vice
    # versa.
    times, lengths = Random(f"times {seed}"), Random(f"lengths {seed}")
    match section:
        case _Trace():
            return OpenLoop(_trace(section, path, notes))
        case _Chats() | _Agents():
            conversations = CHATS if isinstance(section, _Chats) else AGENTS
            return OpenLoop(conversations.arrivals(section.rate_per_s, duration_s, times))
        case _Closed():
            draws = _lengths(section, lengths, source)
            if section.requests is not None:
                draws = (draw for draw, _ in zip(draws, range(section.requests), strict=False))
            return ClosedLoop(draws, section.concurrency, duration_s)
        case _Gamma():
            arrivals = gamma_times(section.rate_per_s, section.cv, duration_s, times)
        case _Burst():
            if section.end_s < section.start_s:
                raise ConfigError(f"'end_s' in {source} is before 'start_s'")
            phases = burst_phases(
                (section.rate_per_s, section.burst_rate_per_s),
                (section.start_s, section.end_s),
                duration_s,
            )
            arrivals = phased_times(phases, section.cv, times)
        case _OnOff():
            phases = on_off_phases(
                (section.on_s, section.on_rate_per_s),
                (section.off_s, section.off_rate_per_s),
                duration_s,
            )
            arrivals = phased_times(phases, 1.0, times)
    prompt, output = _length(section.prompt, source), _length(section.output, source)
    return OpenLoop(list(with_lengths(arrivals, prompt, output, lengths)))


def _lengths(section: _Closed, rng: Random, source: str) -> Iterator[Arrival]:
    prompt, output = _length(section.prompt, source), _length(section.output, source)
    return with_lengths((0.0 for _ in count()), prompt, output, rng)


def _length(value: dict[str, Any] | int, source: str) -> Length:
    data = {"mean": value} if isinstance(value, int) else value
    section = from_mapping(_LengthSection, data, f"a length in {source}")
    if section.least > section.most:
        raise ConfigError(f"a length in {source} has 'least' above 'most'")
    return Length(section.mean, section.cv, section.least, section.most)


def _trace(section: _Trace, path: Path, notes: list[str]) -> list[Arrival]:
    """Arrivals of a trace file; its path is relative to the configuration file."""
    scale = LengthScale(
        section.prompt_scale,
        section.output_scale,
        (section.prompt_least, section.prompt_most),
        (section.output_least, section.output_most),
    )
    try:
        trace = load_trace(path.parent / section.path.expanduser())
        if trace.skipped:
            notes.append(trace.skipped)
        if section.start_s or section.slice_s is not None:
            trace = trace.slice(section.start_s, section.slice_s or trace.span_s + 1)
        if section.rate_per_s is not None:
            trace = trace.scale_rate(section.rate_per_s)
    except TraceError as error:
        raise ConfigError(str(error)) from error
    return arrivals_of(trace, scale)
