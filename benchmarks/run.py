"""`tideserve bench`: compare systems under a scenario, as tables, JSON and pictures."""

import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from benchmarks.co_serving.judging import failures
from benchmarks.errors import BenchError
from benchmarks.probes import drop_cost
from benchmarks.runs.pairs import faster_than_chosen
from benchmarks.runs.report import show
from benchmarks.runs.result import result_of
from benchmarks.runs.runner import BenchPlan, Runner, RunOutcomes, describe_machine
from benchmarks.scenarios.scenario import (
    FASTEST,
    LoadChoice,
    Scenario,
    Trial,
    find_scenario,
    find_trials,
)
from benchmarks.stats import LATENCIES, LatencyTarget
from benchmarks.systems.catalog import check_names, is_reference, is_tideserve, is_vllm
from benchmarks.systems.processor import fastest_dtype, read_processor
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
from tideserve.cli.files import check_writable
from tideserve.cli.model_store import ModelUnavailable, resolve_model
from tideserve.cli.report import Report
from tideserve.cli.tiny_model import (
    DEEP,
    NUM_LAYERS,
    TINY_ON_GPU,
    TINY_OPTIONS,
    write_tiny_model,
)
from tideserve.cli.up import name_of
from tideserve.load.traces import TraceError

AMPLE_FACTOR = 5
TRIAL_MODEL = "tiny-16-layers"
PICTURES = (".png", ".svg", ".pdf")
NO_WEIGHTS = "makes up the weights of its tiny model"
NO_MEMORY = "on a GPU, give a --model that fills it, and the --memory of a worker"


@dataclass(frozen=True, slots=True)
class BenchArguments:
    """The options as given. None leaves the choice to the scenario."""

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


def run_bench(arguments: BenchArguments) -> None:
    """Measure and report.

    Raises:
        CommandError: if it cannot be done (exit code 2) or a system could not run (1).
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report()
    if arguments.scenario == drop_cost.NAME:
        _run_drop_cost(arguments, report)
        return
    if (trial := find_trials().get(arguments.scenario)) is not None:
        _run_trial(arguments, trial, report)
        return
    with _told(), tempfile.TemporaryDirectory(prefix="tideserve-bench-") as folder:
        _check_options(arguments)
        for path in (arguments.json, arguments.plot):
            check_writable(path)
        _check_picture(arguments.plot)
        plan = _plan(arguments, report, Path(folder))
        with report.step(f"Measuring {plan.scenario.name}"):
            outcomes = Runner(plan, report.line, report.doing).run()
    _publish(arguments, report, plan, outcomes)
    if outcomes.unavailable:
        names = ", ".join(outcomes.unavailable)
        raise CommandError(f"these systems could not run: {names}", EXIT_FAILED)


def _run_drop_cost(arguments: BenchArguments, report: Report) -> None:
    """What a drop costs without load. Raises CommandError as `run_bench` does."""
    with _told():
        _check_options(arguments)
        _refuse_load(arguments, "serves no requests")
        _refuse_devices(arguments)
        _refuse_cells(arguments)
        _refuse_cycles(arguments)
        check_writable(arguments.json)
        deployment = _deployment(
            arguments, parse_size_bytes(arguments.memory or drop_cost.MEMORY), report, "bfloat16"
        )
        machine = describe_machine(deployment)
        with report.step("Measuring what a drop costs"):
            wanted = drop_cost.probes(deployment, arguments.choice.quick)
            found = drop_cost.measure(wanted, report.doing)
    report.box("what a drop costs", drop_cost.rows(found))
    result = {"scenario": drop_cost.NAME, "machine": machine} | found
    _write(result, arguments, report)
    if found["unavailable"]:
        raise CommandError("; ".join(found["unavailable"].values()), EXIT_FAILED)


def _run_trial(arguments: BenchArguments, trial: Trial, report: Report) -> None:
    """Run a trial. Raises CommandError as `run_bench` does, and if the trial fails."""
    with _told():
        _check_options(arguments)
        _refuse_load(arguments, "compares nothing", trial.traced)
        if not trial.resumable:
            _refuse_cells(arguments, trial.timed)
        if not trial.cycled:
            _refuse_cycles(arguments)
        if not trial.gpu_memory:
            _refuse_devices(arguments)
        check_writable(arguments.json)
        with _trial_deployment(arguments, trial, report) as deployment:
            machine = describe_machine(deployment)
            with report.step(f"{trial.name}: {trial.summary}"):
                verdict = trial.run(deployment, arguments.choice, report.line, report.doing)
    report.box(trial.summary, list(verdict.rows))
    for problem in verdict.problems:
        report.warn(problem)
    result = {"scenario": trial.name, "machine": machine} | dict(verdict.figures)
    _write(result, arguments, report)
    if verdict.problems:
        raise CommandError(f"{trial.name} has failed: {verdict.problems[0]}", EXIT_FAILED)


@contextmanager
def _told() -> Iterator[None]:
    """What ends a measurement, as the command's error."""
    try:
        with unusable(BenchError, TraceError, ConfigError, ModelUnavailable):
            yield
    except SystemUnavailable as error:
        raise CommandError(str(error), EXIT_FAILED) from error
    except KeyboardInterrupt:
        raise CommandError("stopped before the end; nothing was written", 130) from None


def _write(result: Mapping[str, Any], arguments: BenchArguments, report: Report) -> None:
    """Write the figures if that was asked for."""
    if arguments.json is not None:
        arguments.json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
        report.line(f"figures: {arguments.json}")


@contextmanager
def _trial_deployment(
    arguments: BenchArguments, trial: Trial, report: Report
) -> Iterator[Deployment]:
    """A cluster of the given model, or of a tiny made-up one if none is given and it will do."""
    on_gpu = arguments.choice.on_gpu
    if on_gpu and arguments.model is not None and arguments.memory is None:
        raise BenchError(NO_MEMORY)
    memory_bytes = parse_size_bytes(
        arguments.memory or (trial.gpu_memory if on_gpu else trial.memory)
    )
    if trial.real_model:
        dtype = fastest_dtype(read_processor().flags)
        yield _deployment(arguments, memory_bytes, report, dtype)
        return
    if arguments.model is not None:
        yield _deployment(arguments, memory_bytes, report, "bfloat16")
        return
    _refuse(arguments, {"--load-format": arguments.load_format}, NO_WEIGHTS)
    tokenizer_dir = resolve_model(None, cache_root(), report.line, "auto")
    with tempfile.TemporaryDirectory(prefix="tideserve-bench-") as folder:
        yield Deployment(
            model_dir=write_tiny_model(Path(folder) / "model", tokenizer_dir, DEEP),
            model_name=TRIAL_MODEL,
            cache=cache_root(),
            workers=arguments.workers,
            memory_bytes=memory_bytes,
            dtype=arguments.dtype or trial.dtype,
            device=arguments.device or CPU,
            options=TINY_ON_GPU if on_gpu else TINY_OPTIONS,
        )


def _refuse_load(arguments: BenchArguments, why: str, traced: bool = False) -> None:
    """Refuse options that would have no effect. Raises BenchError.

    `traced`: a trace may be chosen, but not how it is cut.
    """
    given = {
        "--systems": arguments.systems,
        "--paced": arguments.paced,
        "--slo": arguments.slos or None,
        "--plot": arguments.plot,
    }
    _refuse(arguments, given, why)
    _refuse_trace(arguments, why, traced)


def _refuse_trace(
    arguments: BenchArguments, why: str, traced: bool = False, rated: bool = False
) -> None:
    choice = arguments.choice
    given = {
        "--trace": None if traced else choice.trace,
        "--trace-start": choice.trace_start_s,
        "--trace-duration": choice.trace_duration_s,
        "--trace-repeat": choice.trace_repeat,
        "--rate": None if rated else choice.rate_per_s,
        "--time-scale": choice.time_scale,
    }
    _refuse(arguments, given, why)


def _refuse_cells(arguments: BenchArguments, timed: bool = False) -> None:
    choice = arguments.choice
    minutes = None if timed else choice.minutes
    given = {"--cells": choice.cells, "--append": choice.append, "--minutes": minutes}
    _refuse(arguments, given, "has no cells")


def _refuse_devices(arguments: BenchArguments, why: str = "is for processors") -> None:
    given = {"--device": arguments.device, "--load-format": arguments.load_format}
    _refuse(arguments, given, why)


def _refuse_cycles(arguments: BenchArguments) -> None:
    _refuse(arguments, {"--cycles": arguments.choice.cycles}, "has no cycles")


def _refuse(arguments: BenchArguments, given: Mapping[str, Any], why: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise BenchError(f"'{arguments.scenario}' {why}; leave {option} out")


def _check_options(arguments: BenchArguments) -> None:
    """Check the options that `tideserve up` has, too, by its rules. Raises ConfigError."""
    names = ("workers", "memory", "dtype", "device", "load_format", "paced")
    read_options(None, {name: getattr(arguments, name) for name in names})


def _plan(arguments: BenchArguments, report: Report, folder: Path) -> BenchPlan:
    """The plan of a run; `folder` gets a made-up model and must outlive the run."""
    scenario = find_scenario(arguments.scenario)
    _refuse_cycles(arguments)
    _refuse_cells(arguments)
    if not scenario.on_gpus:
        _refuse_devices(arguments)
    tiny = arguments.choice.paced
    memory = scenario.paced_memory if tiny else scenario.memory
    if tiny and not memory:
        raise BenchError(f"'{scenario.name}' has no load for --paced's tiny model; give a --model")
    dtype = _dtype(arguments, scenario)
    names = _names(arguments.systems, _default_systems(arguments.choice, scenario))
    if arguments.systems is None and arguments.dtype is None and not arguments.choice.on_gpu:
        names += _second_names(names, scenario, dtype)
    check_names(names)
    _check_servable(arguments, names)
    if arguments.choice.rate_per_s is not None and arguments.choice.time_scale is not None:
        raise BenchError("--rate and --time-scale both say how dense arrivals are; give one")
    if not scenario.traced:
        _refuse_trace(arguments, "makes requests of its own", rated=scenario.rated)
    if arguments.paced and not any(is_tideserve(name) for name in names):
        raise BenchError("--paced paces tideserve, and no system of this run is one")
    memory_bytes = parse_size_bytes(arguments.memory or memory)
    targets = tuple(read_target(text) for text in arguments.slos)
    # A bad trace is reported before the model is fetched.
    scenario.cases(arguments.choice)
    deployment = _deployment(arguments, memory_bytes, report, dtype)
    if tiny:
        deployment = _tiny(deployment, folder, scenario)
    options = dict(deployment.options) | dict(scenario.options)
    deployment = replace(deployment, event_log=scenario.event_log, options=options)
    return BenchPlan(
        scenario=scenario,
        choice=arguments.choice,
        system_names=names,
        deployment=deployment,
        targets=targets or scenario.targets,
        api_key=arguments.api_key,
    )


def _check_servable(arguments: BenchArguments, names: Sequence[str]) -> None:
    """Refuse what these systems cannot serve. Raises BenchError."""
    vllm = any(map(is_vllm, names))
    if arguments.choice.paced:
        _refuse_devices(arguments, "with --paced is for processors")
    if vllm and (arguments.choice.paced or arguments.load_format == "dummy"):
        raise BenchError("the model has no weights, so vllm cannot serve it; leave it out")
    if arguments.choice.on_gpu:
        _check_for_gpus(arguments, names)


def _check_for_gpus(arguments: BenchArguments, names: Sequence[str]) -> None:
    if any(map(is_vllm, names)):
        raise BenchError(
            "vllm is started on processors only; choose --systems without it, and name=URL for"
            " one that you start on a GPU"
        )
    if not any(map(is_tideserve, names)):
        raise BenchError("--device is for tideserve, and no system of this run is one")
    if any(map(is_reference, names)):
        raise BenchError("ample memory is more than a GPU has; leave systems with -ample out")
    if any(is_tideserve(name) and "chunking" in name.split("-") for name in names):
        raise BenchError("on a GPU, iterations are as long without chunking; leave its suffix out")
    if arguments.memory is None or arguments.model is None:
        raise BenchError(NO_MEMORY)


def _dtype(arguments: BenchArguments, scenario: Scenario) -> str:
    """The dtype of every system whose name asks for none."""
    if arguments.dtype is not None:
        return arguments.dtype
    if arguments.choice.on_gpu:
        return "bfloat16"
    if scenario.dtype == FASTEST:
        return fastest_dtype(read_processor().flags)
    return scenario.dtype


def _second_names(names: Sequence[str], scenario: Scenario, dtype: str) -> tuple[str, ...]:
    """The same systems in the second dtype of the scenario, if it has one beside `dtype`."""
    if scenario.second_dtype in (None, dtype):
        return ()
    return tuple(f"{name}-{scenario.second_dtype}" for name in names)


def _deployment(
    arguments: BenchArguments, memory_bytes: int, report: Report, default_dtype: str
) -> Deployment:
    """The deployment that every system gets. Raises ModelUnavailable."""
    cache = cache_root()
    format = arguments.load_format or "auto"
    model_dir = resolve_model(arguments.model, cache, report.line, format)
    on_gpu = arguments.choice.on_gpu
    return Deployment(
        model_dir=model_dir,
        model_name=name_of(arguments.model, model_dir),
        cache=cache,
        workers=arguments.workers,
        memory_bytes=memory_bytes,
        ample_memory_bytes=AMPLE_FACTOR * memory_bytes,
        dtype=arguments.dtype or default_dtype,
        device=arguments.device or CPU,
        max_running=GPU_LIMITS["max_running"] if on_gpu else RUNNING_MAX,
        options={"load_format": format},
        paced=None if arguments.paced is None else profile_name(arguments.paced),
    )


def _tiny(deployment: Deployment, folder: Path, scenario: Scenario) -> Deployment:
    """The same deployment with a tiny model, which is written into `folder`."""
    model_dir = write_tiny_model(folder / "model", deployment.model_dir, scenario.paced_model)
    return replace(
        deployment,
        model_dir=model_dir,
        model_name=f"tiny-{scenario.paced_model.get('num_hidden_layers', NUM_LAYERS)}-layers",
        dtype="float32",
        options=TINY_OPTIONS,
    )


def _default_systems(choice: LoadChoice, scenario: Scenario) -> tuple[str, ...]:
    if choice.paced:
        return scenario.paced_systems
    if not choice.on_gpu:
        return scenario.systems
    # vLLM is started on processors only, and ample memory is more than a GPU has.
    return tuple(name for name in scenario.systems if not (is_vllm(name) or is_reference(name)))


def _names(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return default
    return tuple(name.strip() for name in given.split(",") if name.strip())


def read_target(text: str) -> LatencyTarget:
    """A target such as "ttft=1.5" (seconds) or "tpot=5x" (times the best system's P50).

    Raises:
        BenchError: if the text is no target.
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
            f"'{text}' is no target; write a latency and seconds (ttft=1.5) or multiples of the"
            f" best P50 (tpot=5x); there are {', '.join(metrics)}"
        )
    return LatencyTarget(metrics[name], limit, relative=number != value)


def _check_picture(path: Path | None) -> None:
    if path is not None and path.suffix not in PICTURES:
        raise BenchError(f"--plot is '{path}', but must end in one of {', '.join(PICTURES)}")


def _publish(
    arguments: BenchArguments, report: Report, plan: BenchPlan, outcomes: RunOutcomes
) -> None:
    result = result_of(plan, outcomes)
    show(result, report.console)
    for sentence in (*result.get("too_mild", ()), *faster_than_chosen(result.get("pairs", {}))):
        report.warn(sentence)
    _write(result, arguments, report)
    if arguments.plot is not None and outcomes.rounds:
        _draw(arguments.plot, plan, outcomes, result["machine"])
        report.line(f"pictures: {arguments.plot}")
    if problems := failures(result.get("co_serving")):
        for problem in problems:
            report.warn(problem)
        raise CommandError(f"{plan.scenario.name} has failed: {problems[0]}", EXIT_FAILED)


def _draw(path: Path, plan: BenchPlan, outcomes: RunOutcomes, machine: Mapping[str, Any]) -> None:
    from benchmarks.plot import draw

    title = f"tideserve bench {plan.scenario.name} · {plan.deployment.model_name}"
    title += f" · {plan.deployment.workers} workers · {machine['cores']} cores"
    if plan.deployment.paced:
        title += f" · systems with @ are paced to {plan.deployment.paced}"
    try:
        draw(title, outcomes.rounds, path)
    except ValueError as error:
        raise CommandError(f"cannot draw {path}: {error}", EXIT_UNUSABLE) from error
