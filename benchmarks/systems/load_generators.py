"""Third-party load generators: their commands and the parsers of their reports."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.systems.client_environment import ensure_client
from benchmarks.systems.system import Say
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.vllm_install import ensure_vllm
from tideserve.sim.report import percentile

RESULT, CONFIG = "result.json", "config.json"
TAIL_CHARS = 300
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # By default it starts ten processes, each of which imports torch.
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",
}


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """`requests` random prompts of `prompt_tokens`, sent with `concurrency`.

    Answers are forced to `output_tokens`. `seed` determines the prompts.
    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    concurrency: int
    seed: int


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server and the folder of its model, whose tokenizer load generators use."""

    url: str
    model: str
    model_dir: Path


@dataclass(frozen=True, slots=True)
class ClientReport:
    """Report of a load generator. TPOT is the mean time per token after the first of a request."""

    completed: int
    throughput_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """`ensure` returns the Python of its environment; raises SystemUnavailable.

    `command` may write files into its folder, which also receives the result.
    """

    name: str
    ensure: Callable[[Path, Say], Path]
    command: Callable[[Path, MeasuredServer, ClientLoad, Path], Sequence[str]]
    report: Callable[[Mapping[str, Any]], ClientReport]


def vllm_command(
    python: Path, server: MeasuredServer, load: ClientLoad, folder: Path
) -> Sequence[str]:
    """Command of `vllm bench serve` with random prompts over /v1/completions."""
    return [
        *(str(python.parent / "vllm"), "bench", "serve", "--backend", "openai"),
        *("--base-url", server.url, "--endpoint", "/v1/completions"),
        *("--model", str(server.model_dir), "--served-model-name", server.model),
        *("--dataset-name", "random", "--random-input-len", str(load.prompt_tokens)),
        *("--random-output-len", str(load.output_tokens), "--ignore-eos"),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--seed", str(load.seed), "--temperature", "0", "--disable-tqdm"),
        # Its readiness check would send the first prompt and fill the prefix cache with it.
        *("--ready-check-timeout-sec", "0"),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,95"),
        *("--save-result", "--result-filename", str(folder / RESULT)),
    ]


def vllm_report(result: Mapping[str, Any]) -> ClientReport:
    """Parse the result file of `vllm bench serve`."""
    return ClientReport(
        int(result["completed"]),
        float(result["output_throughput"]),
        **{
            f"{metric}_{name}_s": float(result[f"{name}_{metric}_ms"]) / 1e3
            for metric in ("ttft", "tpot")
            for name in ("p50", "p95")
        },
    )


def guidellm_command(
    python: Path, server: MeasuredServer, load: ClientLoad, folder: Path
) -> Sequence[str]:
    """Command of `guidellm run` with synthetic text over /v1/completions."""
    spec = {
        "backend": {
            "kind": "openai_http",
            "target": server.url,
            "model": server.model,
            "request_format": "/v1/completions",
            "extras": {"body": {"temperature": 0}},
        },
        "profile": {"kind": "concurrent", "streams": load.concurrency},
        "constraints": [{"kind": "max_requests", "count": load.requests}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(server.model_dir)},
        "seed": {"kind": "static", "value": load.seed},
        "data": [
            {
                "kind": "synthetic_text",
                "prompt_tokens": load.prompt_tokens,
                "output_tokens": load.output_tokens,
            }
        ],
        "outputs": [{"kind": "json", "path": str(folder / RESULT)}],
    }
    config = folder / CONFIG
    config.write_text(json.dumps({"spec": spec}), encoding="utf-8")
    return [str(python.parent / "guidellm"), "run", "-c", str(config), "--disable-console"]


def guidellm_report(result: Mapping[str, Any]) -> ClientReport:
    """Parse the successful requests of the only step; guidellm calls TPOT inter-token latency."""
    done = result["benchmarks"][0]["requests"]["successful"] or []
    if not done:
        return ClientReport(0, 0.0, None, None, None, None)
    begin_s = min(request["request_start_time"] for request in done)
    end_s = max(request["request_end_time"] for request in done)
    latencies = {}
    for name, key in (("ttft", "time_to_first_token_ms"), ("tpot", "inter_token_latency_ms")):
        values = [request[key] / 1e3 for request in done if request[key] is not None]
        latencies[f"{name}_p50_s"] = percentile(values, 0.5)
        latencies[f"{name}_p95_s"] = percentile(values, 0.95)
    tokens = sum(request["output_tokens"] for request in done)
    return ClientReport(len(done), tokens / (end_s - begin_s), **latencies)


def _ensure_guidellm(cache: Path, say: Say) -> Path:
    return ensure_client("guidellm", cache, say, torch=True)


LOAD_GENERATORS = (
    LoadGenerator("vllm bench serve", ensure_vllm, vllm_command, vllm_report),
    LoadGenerator("guidellm", _ensure_guidellm, guidellm_command, guidellm_report),
)


def run_generator(
    client: LoadGenerator,
    python: Path,
    server: MeasuredServer,
    load: ClientLoad,
    folder: Path,
    limit_s: float,
) -> ClientReport:
    """Send the load to the server, with files in `folder`. Raises SystemUnavailable.

    All processes of the client end with it.
    """
    result = folder / RESULT
    # A stale result of the previous round must not pass for this round's.
    result.unlink(missing_ok=True)
    environment = {**os.environ, **ENVIRONMENT}
    # The client has its own environment and must not import our packages.
    environment.pop("PYTHONPATH", None)
    with subprocess.Popen(
        client.command(python, server, load, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired as error:
            raise SystemUnavailable(f"{client.name} did not end within {limit_s:.0f} s") from error
        finally:
            with suppress(ProcessLookupError):
                # Kill the whole session, since load generators start child processes.
                os.killpg(process.pid, signal.SIGKILL)
    try:
        return client.report(json.loads(result.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        last = " ".join(output.split())[-TAIL_CHARS:]
        raise SystemUnavailable(f"{client.name} left no result: {last}") from error
