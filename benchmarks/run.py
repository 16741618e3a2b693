"""`tideserve bench`: run a scenario, and report tables, JSON and plots."""

import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.co_serving.bars import failures
from benchmarks.errors import BenchError
from benchmarks.runs.pairs import faster_than_chosen
from benchmarks.runs.report import show
from benchmarks.runs.result import result_of
from benchmarks.runs.runner import BenchPlan, Runner, describe_machine
from benchmarks.scenarios.scenario import FASTEST, LoadChoice, Scenario, find_scenario
from benchmarks.stats import LATENCIES, LatencyTarget
from benchmarks.systems.catalog import check_names, is_reference, is_tideserve, is_vllm
from benchmarks.systems.processor import fastest_dtype, read_processor
from benchmarks.systems.schedulings import merged
from benchmarks.systems.system import CPU, RUNNING_MAX, Deployment
from services.common.errors import ConfigError
from services.common.size import parse_size_bytes
from services.core.planner.config import GPU_LIMITS
from tideserve.cli.cache import cache_root
from tideserve.cli.cluster_options import profile_name, read_options
from tideserve.cli.default import DEFAULT_WORKERS
from tideserve.cli.errors import (
    EXIT_FAILED,
    EXIT_UNUSABLE,
    CommandError,
    SystemUnavailable,
    unusable,
)
from tideserve.cli.model_store import ModelUnavailable, resolve_model
from tideserve.cli.report import Report
from tideserve.cli.simulate import check_writable
from tideserve.cli.tiny_model import NUM_LAYERS, TINY_ON_GPU, TINY_OPTIONS, write_tiny_model
from tideserve.cli.up import name_of
from tideserve.load.traces import TraceError

AMPLE_FACTOR = 5
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class BenchArguments:
    """The options of the command; None selects the scenario's default.

    `given` are the names of the parameters given on the command line.
    """

    scenario: str
    choice: LoadChoice
    systems: str | None = None
    model: str | None = None
    workers: int = DEFAULT_WORKERS
    memory: str | None = None
    dtype: str | None = None
    device: str | None = None
    load_format: str | None = None
    paced: str | None = None
    slos: Sequence[str] = ()
    api_key: str | None = None
    json: Path | None = None
    plot: Path | None = None
    given: frozenset[str] = frozenset()


def run_bench(arguments: BenchArguments) -> None:
    """Measure and report.

    Raises:
        CommandError: if the run is impossible (exit code 2) or the scenario failed (1).
    """
    # Raise KeyboardInterrupt on SIGTERM, so that all servers are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report()
    with _command_errors(), tempfile.TemporaryDirectory(prefix="tideserve-bench-") as folder:
        scenario = find_scenario(arguments.scenario)
        _check_options(arguments, scenario)
        if scenario.run is None:
            problems = _compare(arguments, scenario, report, Path(folder))
        else:
            problems = _run(arguments, scenario, report, Path(folder))
    if problems:
        raise CommandError(f"{scenario.name} has failed: {problems[0]}", EXIT_FAILED)


@contextmanager
def _command_errors() -> Iterator[None]:
    """Convert errors of a measurement to CommandError."""
    try:
        with unusable(BenchError, TraceError, ConfigError, ModelUnavailable):
            yield
    except SystemUnavailable as error:
        raise CommandError(str(error), EXIT_FAILED) from error
    except KeyboardInterrupt:
        raise CommandError("interrupted; no result was written", 130) from None


def _check_options(arguments: BenchArguments, scenario: Scenario) -> None:
    """Check the options that need no model. Raises BenchError, ConfigError, CommandError."""
    for name in sorted(arguments.given - scenario.reads):
        flag = f"--{name.replace('_', '-')}"
        raise BenchError(f"'{scenario.name}' does not use {flag}; leave it out")
    # Apply the rules of `tideserve up`.
    names = ("workers", "memory", "dtype", "device", "load_format", "paced")
    read_options(None, {name: getattr(arguments, name) for name in names})
    choice, plot = arguments.choice, arguments.plot
    for path in (arguments.json, plot):
        check_writable(path)
    if plot is not None and plot.suffix not in PICTURES:
        raise BenchError(f"--plot is '{plot}', but must end in one of {', '.join(PICTURES)}")
    if choice.rate_per_s is not None and choice.time_scale is not None:
        raise BenchError("--rate and --time-scale both set the arrival rate; give only one of them")
    if choice.quick and choice.draws_faults:
        raise BenchError(
            "--quick chooses fewer cells, and --minutes alone runs random faults; leave one out"
        )
    if choice.paced and not scenario.paced_memory:
        raise BenchError(f"'{scenario.name}' has no load for --paced's tiny model; give a --model")
    if choice.paced and choice.on_gpu:
        raise BenchError("--paced with the tiny model runs on processors; leave --device out")
    if _is_tiny(arguments, scenario) and arguments.load_format is not None:
        raise BenchError("the tiny model has random weights; leave --load-format out")


def _is_tiny(arguments: BenchArguments, scenario: Scenario) -> bool:
    """Whether the run uses a tiny model with random weights."""
    alone = scenario.run is not None and bool(scenario.tiny_model)
    return arguments.choice.paced or (alone and arguments.model is None)


def _run(
    arguments: BenchArguments, scenario: Scenario, report: Report, folder: Path
) -> Sequence[str]:
    """Run a scenario with its own measurement; returns its problems."""
    assert scenario.run is not None
    deployment = _deployment(arguments, scenario, report, folder)
    machine = describe_machine(deployment)
    with report.step(f"Measuring {scenario.name}"):
        verdict = scenario.run(deployment, arguments.choice, report.line, report.doing)
    report.box(scenario.name, list(verdict.rows))
    for problem in verdict.problems:
        report.warn(problem)
    result = {"scenario": scenario.name, "machine": machine, **verdict.figures}
    _write(result, arguments, report)
    return verdict.problems


def _compare(
    arguments: BenchArguments, scenario: Scenario, report: Report, folder: Path
) -> Sequence[str]:
    """Measure the systems in turn; returns the failed bars, or the systems that did not run."""
    choice = arguments.choice
    names = _system_names(arguments, scenario)
    check_names(names)
    _check_servable(arguments, names)
    targets = tuple(read_target(text) for text in arguments.slos)
    scenario.cases(choice)  # report a bad trace before the model is fetched
    deployment = _deployment(arguments, scenario, report, folder)
    plan = BenchPlan(
        *(scenario, choice, names, deployment, targets or scenario.targets, arguments.api_key)
    )
    with report.step(f"Measuring {scenario.name}"):
        outcomes = Runner(plan, report.line, report.doing).run()
    result = result_of(plan, outcomes)
    show(result, report.console)
    problems = failures(result.get("co_serving"))
    slower = faster_than_chosen(result.get("pairs", {}))
    for sentence in (*result.get("too_mild", ()), *slower, *problems):
        report.warn(sentence)
    _write(result, arguments, report)
    if arguments.plot is not None and outcomes.rounds:
        from benchmarks.plot import draw

        title = f"tideserve bench {scenario.name} · {deployment.model_name}"
        title += f" · {deployment.workers} workers · {len(deployment.cores)} cores"
        if deployment.paced:
            title += f" · systems with @ are paced to {deployment.paced}"
        try:
            draw(title, outcomes.rounds, arguments.plot)
        except ValueError as error:
            raise CommandError(f"cannot draw {arguments.plot}: {error}", EXIT_UNUSABLE) from error
        report.line(f"pictures: {arguments.plot}")
    if outcomes.unavailable and not problems:
        names_shown = ", ".join(outcomes.unavailable)
        raise CommandError(f"these systems could not run: {names_shown}", EXIT_FAILED)
    return problems


def _write(result: Mapping[str, Any], arguments: BenchArguments, report: Report) -> None:
    if arguments.json is not None:
        arguments.json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
        report.line(f"figures: {arguments.json}")


def _system_names(arguments: BenchArguments, scenario: Scenario) -> tuple[str, ...]:
    """The chosen systems, or those of the scenario that can run on this device."""
    if arguments.systems is not None:
        return tuple(name.strip() for name in arguments.systems.split(",") if name.strip())
    if arguments.choice.paced:
        return scenario.paced_systems
    if arguments.choice.on_gpu:
        return tuple(name for name in scenario.systems if not (is_vllm(name) or is_reference(name)))
    second = scenario.second_dtype
    if arguments.dtype is not None or second in (None, _dtype(arguments, scenario)):
        return scenario.systems
    return (*scenario.systems, *(f"{name}-{second}" for name in scenario.systems))


def _check_servable(arguments: BenchArguments, names: Sequence[str]) -> None:
    """Reject systems that cannot run this model on this device. Raises BenchError."""
    vllm, ours = any(map(is_vllm, names)), any(map(is_tideserve, names))
    device, on_gpu = arguments.choice, arguments.choice.on_gpu
    refused = {
        "--paced applies to tideserve, but no system of this run is tideserve": (
            arguments.paced and not ours
        ),
        "the model has no weights, so vllm cannot serve it; leave vllm out": (
            vllm and (device.paced or arguments.load_format == "dummy")
        ),
        "vllm is started on processors only; leave it out of --systems, and use name=URL for a"
        " server that you start on a GPU": on_gpu and vllm,
        "--device applies to tideserve, but no system of this run is tideserve": (
            on_gpu and not ours
        ),
        "ample memory exceeds a GPU; leave systems with -ample out": (
            on_gpu and any(map(is_reference, names))
        ),
        "on a GPU, -chunking does not change iterations; leave the suffix out": (
            on_gpu and any(is_tideserve(name) and "chunking" in name.split("-") for name in names)
        ),
    }
    for sentence, applies in refused.items():
        if applies:
            raise BenchError(sentence)


def _dtype(arguments: BenchArguments, scenario: Scenario) -> str:
    """The dtype of systems without a dtype suffix."""
    if arguments.dtype is not None:
        return arguments.dtype
    if _is_tiny(arguments, scenario):
        return scenario.tiny_dtype
    if arguments.choice.on_gpu:
        return "bfloat16"
    return fastest_dtype(read_processor().flags) if scenario.dtype == FASTEST else scenario.dtype


def _deployment(
    arguments: BenchArguments, scenario: Scenario, report: Report, folder: Path
) -> Deployment:
    """The deployment of every system; a tiny model is written into `folder`.

    Raises BenchError, ModelUnavailable.
    """
    tiny, on_gpu = _is_tiny(arguments, scenario), arguments.choice.on_gpu
    # The default model and memory are sized for CPUs.
    if on_gpu and not tiny and None in (arguments.memory, arguments.model):
        raise BenchError("on a GPU, give a --model that fills it and the --memory per worker")
    memory = arguments.memory or scenario.memory_for(arguments.choice, tiny)
    memory_bytes = parse_size_bytes(memory)
    load_format = arguments.load_format or "auto"
    model_dir = resolve_model(arguments.model, cache_root(), report.line, load_format)
    model_name = name_of(arguments.model, model_dir)
    up_options: Mapping[str, Any] = {"load_format": load_format}
    if tiny:
        model_dir = write_tiny_model(folder / "model", model_dir, scenario.tiny_model)
        model_name = f"tiny-{scenario.tiny_model.get('num_hidden_layers', NUM_LAYERS)}-layers"
        up_options = TINY_ON_GPU if on_gpu else TINY_OPTIONS
    return Deployment(
        model_dir=model_dir,
        model_name=model_name,
        cache=cache_root(),
        workers=arguments.workers,
        memory_bytes=memory_bytes,
        ample_memory_bytes=AMPLE_FACTOR * memory_bytes,
        dtype=_dtype(arguments, scenario),
        device=arguments.device or CPU,
        max_running=GPU_LIMITS["max_running"] if on_gpu and not tiny else RUNNING_MAX,
        options=merged(
            {**up_options, **scenario.up_options},
            {} if arguments.paced is None else scenario.paced_options,
        ),
        event_log=scenario.event_log,
        paced=None if arguments.paced is None else profile_name(arguments.paced),
    )


def read_target(text: str) -> LatencyTarget:
    """A target such as "ttft=1.5" (seconds) or "tpot=5x" (times the best system's P50).

    Raises:
        BenchError: if the text is not a target.
    """
    name, _, value = text.partition("=")
    metrics = {metric.removesuffix("_s"): metric for metric in LATENCIES}
    number = value.removesuffix("x")
    try:
        limit = float(number)
    except ValueError:
        limit = 0.0
    if name not in metrics or not 0 < limit < float("inf"):
        raise BenchError(
            f"'{text}' is not a target; write a latency and seconds (ttft=1.5) or multiples of the"
            f" best P50 (tpot=5x); latencies are {', '.join(metrics)}"
        )
    return LatencyTarget(metrics[name], limit, relative=number != value)
