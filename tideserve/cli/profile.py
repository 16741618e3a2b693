"""`tideserve profile`: measures a worker's model runner in a separate process."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from services.common.errors import ConfigError
from tideserve.cli.cache import PROFILES, cache_root, create_cache
from tideserve.cli.cluster_options import ClusterOptions, read_options
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, unusable
from tideserve.cli.model_store import ModelUnavailable, resolve_model
from tideserve.cli.process import child_environment
from tideserve.cli.report import Report

EXIT_INTERRUPTED = 130
STOP_GRACE_S = 5.0
GPU_BATCHES = {"max_batch_tokens": 4096, "max_running": 256}
"""The largest batches measured on a GPU, where workers are often configured above the defaults."""


def run_profile(flags: Mapping[str, Any], quick: bool, as_json: bool) -> None:
    """Profile a model, store the profile and print it. Raises CommandError."""
    report = Report(sys.stderr if as_json else sys.stdout)
    with unusable(ConfigError, ModelUnavailable):
        options = read_options(None, flags)
        model_dir = resolve_model(options.model, cache_root(), report.line, options.load_format)
    create_cache(cache_root())
    on_cpu = options.device == "cpu"
    config = {
        "model_dir": str(model_dir),
        "profile_dir": str(cache_root() / PROFILES),
        "memory_bytes": options.memory,
        "device": options.device,
        "dtype": options.dtype,
        "load_format": options.load_format,
        "threads": options.threads_per_worker,
        "quick": quick,
        "co_runners": options.workers - 1 if on_cpu else 0,
        **({} if on_cpu else GPU_BATCHES),
    }
    others = f", {options.workers} engines at once" if on_cpu else ""
    with report.step(f"Profile of {model_dir.name} on {options.device}, {options.dtype}{others}"):
        result = measure(config, options, report)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show(result, Console(highlight=False))


def measure(config: Mapping[str, Any], options: ClusterOptions, report: Report) -> dict[str, Any]:
    """Run the profiling process; returns its result. Raises CommandError."""
    environment = child_environment({"OMP_NUM_THREADS": str(options.threads_per_worker)})
    process = subprocess.Popen(
        [sys.executable, "-m", "services.worker.engine.profile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(yaml.safe_dump(dict(config)))
        process.stdin.close()
        for kind, value in _messages(process.stdout):
            match kind:
                case "progress":
                    report.doing(f"{100 * value['done'] // value['wanted']} % measured")
                case "result":
                    return dict(value)
                case "error":
                    raise CommandError(str(value), EXIT_UNUSABLE)
        raise CommandError(f"the profiling process ended with code {process.wait()}; see above")
    except KeyboardInterrupt:
        raise CommandError("stopped; no profile was stored", EXIT_INTERRUPTED) from None
    finally:
        process.kill()
        process.wait(STOP_GRACE_S)


def _messages(stream: IO[str]) -> Iterator[tuple[str, Any]]:
    for line in stream:
        message = json.loads(line)
        yield from message.items()


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the coefficients and errors as tables."""
    cost = result["profile"]["cost"]
    console.print("cost of a chunk of c tokens after p: α(p·c + (c²+c)/2) + β·c + γ + κ·p")
    if cost["mu_s"]:
        beyond = f"{_microseconds(cost['mu_s'])} µs more each"
        console.print(f"beyond {cost['knee_tokens']} tokens of a batch, its knee, {beyond}")
    table = Table(box=SIMPLE, header_style="dim", padding=(0, 1, 0, 0))
    for column in ("microseconds", "α a pair", "β a token", "γ a chunk", "κ a prefix token", "λ"):
        table.add_column(column, justify="left" if column == "microseconds" else "right")
    decode = cost.get("decode")
    coefficients = [cost[key] for key in ("alpha_s", "beta_s", "gamma_s", "kappa_s", "lambda_s")]
    table.add_row("prefill" if decode else "all", *map(_microseconds, coefficients))
    if decode:
        own = [decode[key] for key in ("alpha_s", "beta_s", "gamma_s")]
        table.add_row("decode", *map(_microseconds, own), "", "")
    console.print(table)
    table = Table(box=SIMPLE, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("held-out batches")
    table.add_column("number", justify="right")
    table.add_column("mean |error|", justify="right")
    for row in result["kinds"]:
        table.add_row(row["kind"], str(row["batches"]), _percent(row["error"]))
    batches = sum(row["batches"] for row in result["kinds"])
    table.add_row("without prefix", "", _percent(result["error_without_prefix"]))
    table.add_row("with prefix", "", _percent(result["error_with_prefix"]))
    table.add_row("all", str(batches), _percent(result["error"]))
    console.print(table)
    _show_link(result, console)
    verdict = "[green]met[/]" if result["passed"] else "[yellow]not met[/]"
    console.print(
        f"Medians of {result['rounds']} interleaved repeats. Noise of repeated measurements:"
        f" {_percent(result['noise'])}. Target: an error of at most"
        f" {_percent(result['error_max'])} (5 %, or 1.5 × the noise): {verdict}.",
        soft_wrap=True,
    )
    if not result["quiet"]:
        console.print(
            "[yellow]! Other processes kept the machine busy, so these figures are unreliable;"
            " repeat the run on an idle machine.[/]",
            soft_wrap=True,
        )
    console.print(
        f"Stored in {result['path']} after {result['took_s']:.0f} s; workers with this model,"
        " device, dtype and number of threads will load it.",
        soft_wrap=True,
    )


def _show_link(result: Mapping[str, Any], console: Console) -> None:
    """Print the bandwidth between device and host memory."""
    if link := result["profile"].get("host_link"):
        console.print(
            "host link, GiB/s of 1 MiB / 64 MiB:"
            f" to the host {_gib(link['small_to_host'])} / {_gib(link['large_to_host'])},"
            f" to the device {_gib(link['small_to_device'])} / {_gib(link['large_to_device'])}"
        )


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.4g}"


def _gib(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 2**30:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
