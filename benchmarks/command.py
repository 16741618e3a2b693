"""`tideserve bench`. Everything heavy is imported when it runs."""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from benchmarks.scenarios import scenario_names, scenario_summaries
from tideserve.cli.default import DEFAULT_WORKERS
from tideserve.cli.option_command import Flags, Wording
from tideserve.cli.option_types import ApiKey

OF_SCENARIO = Wording(default="the scenario's")
FLAGS = Flags(
    ("model", "load_format", "workers", "memory", "dtype", "device", "paced"),
    {
        "workers": Wording("Workers, and instances of vLLM."),
        "memory": OF_SCENARIO,
        "dtype": OF_SCENARIO,
        "device": Wording(
            "Device of tideserve's workers, in burst, steady, churn, faults, soak and survive;"
            " cuda:0 is one GPU that they share. Give a --model and the --memory of a worker for"
            " it; the last four can do without."
        ),
        "load_format": Wording(
            "Of a --model, auto: weights of its files; dummy: random ones. In the scenarios that"
            " have --device."
        ),
        "paced": Wording(
            "Device profile (A100-14B, or A100-14B:2 at half its speed) whose iteration times are"
            " kept, too; without --model, by a tiny model that this machine computes fast enough."
        ),
    },
)
EPILOG = (
    "Scenarios:\n\n"
    + "".join(f"  {name}: {summary}\n\n" for name, summary in scenario_summaries().items())
    + "Examples:\n\n"
    "  tideserve bench steady --quick\n\n"
    "  tideserve bench burst --quick --json burst.json --plot burst.png\n\n"
    "  tideserve bench steady --systems tideserve,mine=http://127.0.0.1:9000\n\n"
    "  tideserve bench coserve --quick --paced A100-14B:4 --systems online-only,eager,priority,slo"
    "\n\n"
    "  tideserve bench realtime --quick --paced A100-40G-7B:4 --systems fcfs,slo"
)


ScenarioName = Annotated[
    str,
    typer.Argument(
        help=f"One of {', '.join(scenario_names())}; see below what each measures. With --help,"
        " that of this one alone."
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Measure for at most four minutes per system; coserve: five; realtime: nine.",
    ),
]
Systems = Annotated[
    str | None,
    typer.Option(
        help="Separated by commas: tideserve (with the default overload policy), an overload policy"
        " (drop, recompute), what goes first (fcfs, priority, eager, prefill-first, round-robin,"
        " bros, waiting-time, slo, slo-quarter, slo-half, slo-full, reserved, online-only), vllm,"
        " vllm-priority, name=URL. A suffix switches a mechanism off: -exchange, -lookahead,"
        " -restore, -chunking, -ample (the memory limit, also of vllm). After what goes first, a"
        " number such as -256 is the tokens of an iteration, and -preempting lets online requests"
        " interrupt batch work; -packing, -slots and -victims switch parts of BROS on; -groups has"
        " a deadline for each token of realtime instead of each group. -float32 or -bfloat16 sets"
        " the dtype.",
        show_default="the scenario's",
    ),
]
FiguresFile = Annotated[Path | None, typer.Option(help="File for all figures.")]
PictureFile = Annotated[Path | None, typer.Option(help="File for pictures: .png, .svg, .pdf.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(help="Target: ttft=1.5 (seconds), tpot=5x (times the best P50)."),
]
Trace = Annotated[
    str | None,
    typer.Option(
        help="Azure or BurstGPT CSV, Mooncake JSONL, or made-up arrivals:"
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
        help="How many times the slice is sent, one time after the other.",
        show_default="once; a full run of the scenario's own slice twice",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Mean requests a second, of coserve and realtime online ones; the pattern is kept.",
    ),
]
TimeScale = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Instead of --rate: factor of the times between arrivals; 1 is as recorded.",
    ),
]
Cycles = Annotated[
    int | None,
    typer.Option(
        min=1, max=100_000, help="Merges of churn, each with a split.", show_default="100"
    ),
]
Cells = Annotated[
    str | None,
    typer.Option(
        help="Cells of faults: a regular expression, such as '2/.*/kill'.", show_default="all"
    ),
]
Append = Annotated[
    Path | None,
    typer.Option(help="File of the cells of faults that are done; they are not run again."),
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0, help="No cell of faults begins after so many minutes; soak lasts so long."),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of the prompts, and of the arrivals of a pattern.")
]


def of_scenario(command: TyperCommand, arguments: Sequence[str]) -> TyperCommand | None:
    """The command with the options that the scenario among `arguments` reads, and its own words."""
    name = next((one for one in arguments if one in scenario_names()), None)
    if name is None:
        return None
    from benchmarks.scenarios.scenario import Description, describe

    scenario = describe(name) or Description(scenario_summaries()[name])
    params = [copy(one) for one in command.params if one.name in scenario.reads | {"scenario"}]
    for one in params:
        if one.name == "model" and isinstance(one, TyperOption) and scenario.default_model:
            one.show_default = scenario.default_model
    return TyperCommand(
        name=command.name,
        callback=command.callback,
        params=params,
        help=scenario.text,
        epilog="\n\n".join(scenario.details),
        rich_markup_mode=command.rich_markup_mode,
        context_settings=dict(command.context_settings),
    )


def bench(
    context: typer.Context,
    scenario: ScenarioName,
    quick: Quick = False,
    systems: Systems = None,
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
    seed: Seed = 0,
    api_key: ApiKey = None,
) -> None:
    """Compare systems: latencies, throughput, service levels, KV demand."""
    from benchmarks.run import BenchArguments, run_bench
    from benchmarks.scenarios.scenario import LoadChoice
    from benchmarks.systems.system import CPU
    from services.common.device_profile import split_slowdown

    given = {name: value for name, value in context.obj.items() if value is not None}
    paced = given.get("paced")
    tiny = paced is not None and "model" not in given
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
        on_gpu=given.get("device", CPU) != CPU,
        slowdown=split_slowdown(paced)[1] if paced is not None and tiny else 1.0,
        cycles=cycles,
        cells=cells,
        append=append,
        minutes=minutes,
        workers=given.get("workers", DEFAULT_WORKERS),
    )
    own: dict[str, Any] = {"slos": slo or (), "api_key": api_key, "json": json, "plot": plot}
    run_bench(BenchArguments(scenario, choice, systems, **own, **given))
