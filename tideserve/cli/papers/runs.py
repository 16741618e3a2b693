"""Runs of the simulator for pages: from example files with changed keys, and of mixed lengths."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from services.common.config import read_yaml
from tideserve.cli.simulate import figures_of_load
from tideserve.cli.simulation_options import PreparedSimulation, simulations_of
from tideserve.sim.workload import Arrival, Length

EXAMPLES = Path(__file__).resolve().parents[2] / "sim" / "examples"
Figures = Mapping[str, Any]
Step = Callable[[str], None]
"""Reports what runs now."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """How long a page may take: `factor` of the simulated durations and numbers of requests."""

    seed: int = 0
    factor: float = 1.0
    step: Step = field(default=lambda line: None)


def run_example(
    name: str, run: PageRun, changes: Mapping[str, Any] | None = None
) -> dict[str, Mapping[str, Figures]]:
    """Figures by load and system of an example file, whose top keys `changes` replace.

    Raises ConfigError.
    """
    return {
        load: figures_of_load(prepared, partial(_report, run, load))
        for load, prepared in example(name, run, changes).items()
    }


def example(
    name: str, run: PageRun, changes: Mapping[str, Any] | None = None
) -> dict[str, PreparedSimulation]:
    """The simulations of an example file by load, see `run_example`. Raises ConfigError."""
    path = EXAMPLES / f"{name}.yaml"
    data = {**read_yaml(path), **(changes or {}), "seed": run.seed}
    data["duration_s"] = max(1.0, float(data.get("duration_s", 60.0)) * run.factor)
    return simulations_of(data, path)


def _report(run: PageRun, load: str, system: str) -> None:
    run.step(f"{load} {system}")


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Prompt and output lengths of a data set; several: each with its share of the requests."""

    parts: Sequence[tuple[float, Length, Length]]

    def drawn(self, rng: Random) -> Iterator[Arrival]:
        """Endless requests, all at 0 s."""
        weights = [share for share, _, _ in self.parts]
        while True:
            ((_, prompt, output),) = rng.choices(self.parts, weights)
            yield Arrival(0.0, prompt.draw(rng), output.draw(rng))

    def arriving(self, times_s: Iterator[float], rng: Random) -> list[Arrival]:
        """A request at each time."""
        requests = self.drawn(rng)
        return [next(requests)._replace(arrival_s=time_s) for time_s in times_s]


def at(figures: Figures, *path: str) -> Any:
    """A nested figure; None where a part is missing."""
    value: Any = figures
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
