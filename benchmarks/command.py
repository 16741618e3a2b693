"""The command `tideserve bench`. Heavy modules are imported when it runs."""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from benchmarks.scenarios import SUMMARIES
from tideserve.cli.default import DEFAULT_WORKERS
from tideserve.cli.option_command import Flags, Wording
from tideserve.cli.option_types import ApiKey

OF_SCENARIO = Wording(default="the scenario's")
FLAGS = Flags(
    ("model", "load_format", "workers", "memory", "dtype", "device", "paced"),
    {
        "workers": Wording("Number of workers, and of vLLM instances."),
        "memory": OF_SCENARIO,
        "dtype": OF_SCENARIO,
        "device": Wording(
            "Device of tideserve's workers; with cuda:0 they share a GPU. A GPU needs --model and"
            " --memory (per worker), except for churn, faults and survive."
        ),
        "load_format": Wording("Weights of --model: its files (auto) or random (dummy)."),
        "paced": Wording(
            "Device profile whose iteration times workers keep to: A100-14B, or A100-14B:2 at half"
            " its speed. Without --model, a tiny model runs, which is fast enough for that."
        ),
    },
)
EPILOG = (
    "Scenarios:\n\n"
    + "".join(f"  {name}: {summary}\n\n" for name, summary in SUMMARIES.items())
    + "Examples:\n\n"
    "  tideserve bench steady --quick\n\n"
    "  tideserve bench burst --quick --json burst.json --plot burst.png\n\n"
    "  tideserve bench burst --ablation --quick --paced A100-14B:2\n\n"
    "  tideserve bench steady --systems tideserve,mine=http://127.0.0.1:9000\n\n"
    "  tideserve bench coserve --quick --paced A100-14B:4 --systems online-only,eager,priority,slo"
    "\n\n"
    "  tideserve bench realtime --quick --paced A100-40G-7B:4 --systems fcfs,slo"
)

ScenarioName = Annotated[
    str,
    typer.Argument(help="Scenario to run, see below. With --help: the options of this scenario."),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Measure at most four minutes per system (coserve: five; realtime: nine).",
    ),
]
Ablation = Annotated[
    bool,
    typer.Option("--ablation", help="burst: add the mechanisms of drop step by step."),
]
Phases = Annotated[
    bool,
    typer.Option("--phases", help="coserve: add ConServe's mechanisms and host memory by steps."),
]
Systems = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: tideserve (default overload policy), drop, recompute, "
        "static-pipeline, migrate (overload policies), a scheduling (fcfs, priority, eager, "
        "prefill-first, round-robin, bros, conserve, waiting-time, slo, slo-quarter, slo-half, "
        "slo-full, reserved, online-only), vllm, vllm-priority, name=URL. Suffixes disable "
        "a mechanism: -exchange, -lookahead, -restore, -moves, -chunking, -ample (the memory "
        "limit, also of vllm). After a scheduling, -256 limits the tokens of an iteration, "
        "-preempting lets online requests interrupt batch work, -patient does not, with -idle it "
        "runs while no online request does, -host copies KV to host memory and back, -all also "
        "that of running online requests, -save lets nothing else run while it is copied back, "
        "-packing, -slots, -victims and -sharing enable parts of BROS, -block64 sets KV blocks of "
        "64 tokens, -groups "
        "sets a deadline for each token instead of each group, -api sends batch work as files "
        "to /v1/batches. -float32 or -bfloat16 sets the dtype.",
        show_default="the scenario's",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100,
        help="Rounds in which all systems take turns.",
        show_default="the scenario's",
    ),
]
FiguresFile = Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")]
PictureFile = Annotated[Path | None, typer.Option(help="Plot the figures: .png, .svg or .pdf.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(help="Latency target: ttft=1.5 (seconds), tpot=5x (times the best P50)."),
]
Trace = Annotated[
    str | None,
    typer.Option(
        help="Azure or BurstGPT CSV, Mooncake JSONL, or synthetic arrivals:"
        " gamma:RATE,CV,SECONDS or phases:SECONDS@RATE,…",
        show_default="Azure conversations",
    ),
]
TraceStart = Annotated[
    float | None, typer.Option(min=0, help="Start of the slice of the trace, in seconds.")
]
TraceDuration = Annotated[
    float | None, typer.Option(min=0.001, help="Length of the slice, in seconds.")
]
TraceRepeat = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1000,
        help="Consecutive repetitions of the slice.",
        show_default="1; 2 in a full run of the scenario's own slice",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(min=0.001, help="Mean (online) requests per second; keeps the arrival pattern."),
]
TimeScale = Annotated[
    float | None,
    typer.Option(min=0.001, help="Instead of --rate: factor on the times between arrivals."),
]
Cycles = Annotated[
    int | None,
    typer.Option(min=1, max=100_000, help="churn: merges, each with a split.", show_default="100"),
]
Cells = Annotated[
    str | None,
    typer.Option(
        help="faults, overload: cells, a regular expression such as '2/.*/kill' or 'tideserve/10'.",
        show_default="all",
    ),
]
Append = Annotated[
    Path | None, typer.Option(help="faults: file with the finished cells, which are skipped.")
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="faults: start no cell after this many minutes; without --cells and --append, run"
        " random faults and floods for this long (not with --quick).",
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=10, help="overload: seconds of each load.", show_default="120; 20 with --quick"
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the prompts and of synthetic arrivals.")]


def of_scenario(command: TyperCommand, arguments: Sequence[str]) -> TyperCommand | None:
    """The command with the options and description of the scenario in `arguments`."""
    name = next((argument for argument in arguments if argument in SUMMARIES), None)
    if name is None:
        return None
    import importlib

    from benchmarks.scenarios.scenario import find_scenario

    scenario = find_scenario(name)
    shown = scenario.reads | {"scenario"}
    params = [copy(param) for param in command.params if param.name in shown]
    tiny = scenario.run is not None and bool(scenario.tiny_model)
    for param in params:
        if param.name == "model" and isinstance(param, TyperOption) and tiny:
            param.show_default = "a tiny model with random weights"
    return TyperCommand(
        name=command.name,
        callback=command.callback,
        params=params,
        help=importlib.import_module(f"benchmarks.scenarios.{name}").__doc__,
        epilog="\n\n".join(scenario.details()),
        rich_markup_mode=command.rich_markup_mode,
        context_settings=dict(command.context_settings),
    )


def bench(
    context: typer.Context,
    scenario: ScenarioName,
    quick: Quick = False,
    ablation: Ablation = False,
    phases: Phases = False,
    systems: Systems = None,
    rounds: Rounds = None,
    json: FiguresFile = None,
    plot: PictureFile = None,
    slo: Targets = None,
    trace: Trace = None,
    trace_start: TraceStart = None,
    trace_duration: TraceDuration = None,
    trace_repeat: TraceRepeat = None,
    rate: Rate = None,
    time_scale: TimeScale = None,
    cycles: Cycles = None,
    cells: Cells = None,
    append: Append = None,
    minutes: Minutes = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    api_key: ApiKey = None,
) -> None:
    """Measure tideserve and compare it with other systems."""
    from benchmarks.run import BenchArguments, run_bench
    from benchmarks.scenarios.scenario import ABLATION, PHASES, LoadChoice
    from benchmarks.systems.system import CPU
    from services.common.device_profile import split_slowdown

    flags = {name: value for name, value in context.obj.items() if value is not None}
    sources = {
        param.name: context.get_parameter_source(param.name)
        for param in context.command.params
        if param.name not in (None, "scenario")
    }
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    paced = flags.get("paced")
    tiny = paced is not None and "model" not in flags
    choice = LoadChoice(
        quick=quick,
        seed=seed,
        trace=trace,
        trace_start_s=trace_start,
        trace_duration_s=trace_duration,
        trace_repeat=trace_repeat,
        rate_per_s=rate,
        time_scale=time_scale,
        paced=tiny,
        on_gpu=flags.get("device", CPU) != CPU,
        slowdown=split_slowdown(paced)[1] if paced is not None and tiny else 1.0,
        cycles=cycles,
        cells=cells,
        append=append,
        minutes=minutes,
        seconds=seconds,
        rounds=rounds,
        workers=flags.get("workers", DEFAULT_WORKERS),
    )
    if scenario == "burst" and ablation:
        scenario = ABLATION
    if scenario == "coserve" and phases:
        scenario = PHASES
    own: dict[str, Any] = {"slos": slo or (), "api_key": api_key, "json": json, "plot": plot}
    arguments = BenchArguments(scenario, choice, systems, given=frozenset(given), **own, **flags)
    run_bench(arguments)
