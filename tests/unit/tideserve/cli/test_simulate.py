"""`tideserve simulate`: valid examples, figures as JSON, a short error for each invalid key."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.core.cost.model import Coefficients, CostModel
from services.core.queue_order import Scheduling
from services.core.scheduler.class_rules import ClassRules
from services.core.service import Service, ServiceClass
from tideserve.cli.errors import CommandError
from tideserve.cli.simulate import run_simulation, simulate, targeted
from tideserve.cli.simulation_options import read_simulation
from tideserve.sim.report import figures
from tideserve.sim.workload import CoServed

EXAMPLES = Path(__file__).resolve().parents[4] / "tideserve" / "sim" / "examples"
COST = "cost: {alpha_s: 1.0e-8, beta_s: 1.0e-4, gamma_s: 0.02, lambda_s: 0.019}"
WORKLOAD = "workload: {kind: gamma, rate_per_s: 2, prompt: 50, output: {mean: 20, cv: 0.5}}"
SMALL = f"instances: 2\nduration_s: 20\nkv_blocks: 500\n{COST}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "simulation.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    prepared = read_simulation(path, None)
    assert all(spec.instances >= 1 for spec, _ in prepared.systems.values())


def test_the_example_of_a_drop_overflows_the_kv_cache() -> None:
    prepared = read_simulation(EXAMPLES / "drop-a100.yaml", None)
    assert set(prepared.systems) == {"drop", "recompute"}
    result = figures(simulate(prepared, "recompute"))
    assert result["kv_demand_peak_ratio"] > 1.2
    assert result["preemptions"] > 0


def test_figures_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, written = write(tmp_path, SMALL + WORKLOAD), tmp_path / "figures.json"
    run_simulation(path, 3, written)
    text = capsys.readouterr().out
    assert "time to first token" in text and "simulated, not measured" in text
    result = json.loads(written.read_text())
    simulated = result["systems"]["simulated"]
    assert simulated["completed"] == simulated["sent"] > 20
    assert (
        0.02 < simulated["ttft_s"]["p50"] < simulated["ttft_s"]["p99"] <= simulated["ttft_s"]["max"]
    )
    assert result["config"]["seed"] == 3
    run_simulation(path, 3, written)
    assert json.loads(written.read_text())["systems"] == result["systems"]


CO_SERVED = f"""
{SMALL}max_running: 64
{WORKLOAD}
service: {{slo_class: interactive, targets_of: alone}}
batch: {{clients: 40, prompt: 300, output: 20, window_from_s: 2}}
systems:
  alone: {{scheduling: slo, batch: {{clients: 0}}}}
  priority: {{scheduling: priority, batch_groups: 1}}
  slo: {{scheduling: slo, harvest: 0.5}}
"""


def test_systems_are_compared_by_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, written = write(tmp_path, CO_SERVED), tmp_path / "figures.json"
    prepared = read_simulation(path, None)
    spec = prepared.systems["priority"][0]
    assert spec.scheduler.rules == ClassRules(Scheduling.PRIORITY, batch_groups=1)
    assert spec.iteration.scheduling is Scheduling.PRIORITY
    run_simulation(path, None, written)
    systems = json.loads(written.read_text())["systems"]
    assert list(systems) == ["alone", "priority", "slo"]
    assert systems["alone"]["classes"]["batch"]["sent"] == 0
    assert systems["slo"]["processed_tokens_per_s"] > 2 * systems["alone"]["processed_tokens_per_s"]
    output = " ".join(capsys.readouterr().out.split())
    gain = systems["slo"]["processed_tokens_per_s"] / systems["alone"]["processed_tokens_per_s"]
    assert f"slo against alone: processed tokens {gain:.2f}, online P99 TTFT" in output
    assert "recomputed; first token p50" in output


def test_systems_run_the_same_load_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = "loads: {calm: {rate_per_s: 1}, lively: {rate_per_s: 4, cv: 2}}\n"
    path, written = write(tmp_path, CO_SERVED + loads), tmp_path / "figures.json"
    run_simulation(path, None, written)
    sections = json.loads(written.read_text())["scenarios"]
    assert list(sections) == ["calm", "lively"]
    sent = {
        name: [system["classes"]["online"]["sent"] for system in section["systems"].values()]
        for name, section in sections.items()
    }
    assert len(set(sent["calm"])) == len(set(sent["lively"])) == 1, "all serve the same requests"
    assert sent["lively"][0] > 2 * sent["calm"][0]
    assert "load lively" in capsys.readouterr().out


def test_the_first_system_sets_the_targets_of_the_others(tmp_path: Path) -> None:
    prepared = read_simulation(write(tmp_path, CO_SERVED), None)
    result = figures(simulate(prepared, "alone"))
    online = result["classes"]["online"]
    _, workload = targeted(prepared, result).systems["slo"]
    assert isinstance(workload, CoServed)
    assert {arrival.service for arrival in workload.online.arrivals} == {
        Service(ServiceClass.INTERACTIVE, online["ttft_s"]["p99"], online["inter_token_s"]["p99"])
    }
    with pytest.raises(ConfigError, match="'alone' has no P99 to use as a target"):
        targeted(prepared, {})


def test_a_closed_loop_ends_with_its_requests(tmp_path: Path) -> None:
    closed = "workload: {kind: closed, concurrency: 4, requests: 11, prompt: 20, output: 5}"
    written = tmp_path / "figures.json"
    run_simulation(write(tmp_path, SMALL + closed), None, written)
    assert json.loads(written.read_text())["systems"]["simulated"]["sent"] == 11


BAD = {
    "instancs: 3": "did you mean 'instances'",
    "instances: 0": "must be 1 to",
    "profile: A100-14B": "either 'profile' or 'cost'",
    "memory: 1GiB": "both 'kv_blocks' and 'memory'",
    "max_running: 4000": "'max_running' is 4000",
    "delays: {ask_s: -1}": "'ask_s'",
    "delays: {aks_s: 1}": "did you mean 'ask_s'",
    "monitor: {smoothing_s: 0}": "'smoothing_s' in section 'monitor' of .* is 0.0,",
    "shape: 3": "must be of type dict",
    "workload: {kind: gama}": "must be one of gamma",
    "workload: {kind: gamma}": "'rate_per_s' is missing",
    "workload: {kind: gamma, rate_per_s: 1, cvs: 2}": "did you mean 'cv'",
    "workload: {kind: gamma, rate_per_s: 1, prompt: {mean: 5, least: 9, most: 3}}": "'least'",
    "workload: {kind: trace, path: nowhere.csv}": "cannot read the trace",
    "batch: {clients: 1, prompt: 5, output: 5}\nworkload: {kind: closed, concurrency: 1}": (
        "closed loop of clients"
    ),
    "workload: 3": "must be of type dict",
    "service: {slo_class: batch}": "'slo_class'",
    "service: {ttft_s: 1, targets_of: a}": "both 'targets_of' and targets",
    "batch: {clients: 1, prompt: 5}": "'output' is missing",
    "systems: {a: {seed: 3}}": "'seed', which all systems share",
    "loads: {a: 3}": "'loads' in .* must map names",
    "loads: {a: {rate: 3}}": "unknown configuration key 'rate'",
    "systems: {a: {loads: {}}}": "'loads', which all systems share",
    "rebalance: stucks": "'rebalance'",
    "rebalance: stuck": "lacks the sizes of layers",
    "systems: {a: 3}": "must be a mapping of keys that differ",
    "systems: {a: {fill: 1}}": "unknown configuration key 'fill' in system 'a'",
    "systems: {a: {workload: {rate_per_s: -1}}}": "'rate_per_s'",
    "systems: {a: {service: {targets_of: b}}}": "'targets_of' in .* is 'b', but there are a",
}


@pytest.mark.parametrize("line", BAD)
def test_invalid_input_is_a_short_error(tmp_path: Path, line: str) -> None:
    text = SMALL + (line if line.startswith("workload") else WORKLOAD)
    key = line.split(":")[0]
    kept = [line for line in text.splitlines() if not line.startswith(f"{key}:")]
    path = write(tmp_path, "\n".join([*kept, line]))
    with pytest.raises(CommandError, match=BAD[line].replace("(", r"\(")) as raised:
        run_simulation(path, None, None)
    assert "\n" not in str(raised.value)


def test_missing_files_and_sizes_are_short_errors(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot read"):
        run_simulation(tmp_path / "none.yaml", None, None)
    with pytest.raises(CommandError, match="set 'kv_blocks'"):
        run_simulation(write(tmp_path, f"{COST}\n{WORKLOAD}"), None, None)
    moving = (
        f"profile: A100-14B\nmemory: 40GiB\nrebalance: stuck\nprefix_caching: false\n{WORKLOAD}"
    )
    with pytest.raises(CommandError, match="set 'prefix_caching: true'"):
        run_simulation(write(tmp_path, f"{moving}\n{WORKLOAD}"), None, None)
    little = f"profile: A100-14B\nmemory: 20GiB\n{WORKLOAD}"
    with pytest.raises(CommandError, match="leaves no KV block"):
        run_simulation(write(tmp_path, little), None, None)


def test_malformed_trace_rows_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,9,4\nx,y,z\n"
    (tmp_path / "trace.csv").write_text(rows)
    run_simulation(write(tmp_path, SMALL + "workload: {kind: trace, path: trace.csv}"), None, None)
    output = capsys.readouterr()
    assert "1 malformed rows skipped (line 3)" in " ".join((output.out + output.err).split())


MODELS: dict[str, dict[str, Any]] = {
    "opt-13b": {"gpus": 2, "layers": 40, "hidden": 5120, "mlp": 2 * 20480, "hbm": 1.555e12},
    "opt-30b": {"gpus": 4, "layers": 48, "hidden": 7168, "mlp": 2 * 28672, "hbm": 1.555e12},
    "llama-70b": {"gpus": 8, "layers": 80, "hidden": 8192, "mlp": 3 * 28672, "hbm": 2.039e12},
}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_devices_of_bros_follow_from_their_derivation(name: str) -> None:
    """The formulas at the top of each file give its figures."""
    model, llama = MODELS[name], name == "llama-70b"
    gpus, layers, hidden = model["gpus"], model["layers"], model["hidden"]
    kv_width = 8 * 128 if llama else hidden
    layer_parameters = layers * hidden * (2 * hidden + 2 * kv_width + model["mlp"])
    head_parameters = (128256 if llama else 50272) * hidden
    peak, memory = gpus * 3.12e14 * 0.6, gpus * model["hbm"] * 0.8
    reduce_s = 2 * layers * 2 * (gpus - 1) / gpus * 2 * hidden / 3e11
    lam = 2 * (layer_parameters + head_parameters) / memory + 0.002 + 2 * layers * 1e-5
    kv_bytes = 2 * layers * kv_width * 2
    expected = CostModel(
        alpha=4 * layers * hidden / peak,
        beta=2 * layer_parameters / peak + reduce_s,
        gamma=lam + 2e-5,
        lam=lam,
        decode=Coefficients(kv_bytes / memory, reduce_s, lam + 2e-5),
        kappa=kv_bytes / memory,
    )
    prepared = read_simulation(EXAMPLES / f"hybrid-bros-{name}.yaml", None)
    for batch in ([(0, 2048)], [(1000, 1)], [(4000, 100), *[(700, 1)] * 50]):
        made = prepared.time_model.model.batch_s(batch)
        assert made == pytest.approx(expected.batch_s(batch), rel=1e-3)
    device_bytes = (80 if llama else 40) << 30
    parameters = 2 * (layer_parameters + (2 if llama else 1) * head_parameters)
    free_bytes = 0.9 * gpus * device_bytes - parameters
    spec, _ = prepared.systems["slo"]
    assert spec.iteration.num_blocks == free_bytes // (16 * kv_bytes)


def test_lengths_of_a_backlog_may_be_uniform(tmp_path: Path) -> None:
    lengths = "prompt: {least: 5, most: 9}, output: {least: 2, most: 2}"
    text = CO_SERVED.replace("prompt: 300, output: 20", lengths)
    batches = []
    for seed in (1, 1, 2):
        _, workload = read_simulation(write(tmp_path, text), seed).systems["slo"]
        assert isinstance(workload, CoServed)
        batches.append(list(islice(workload.batch.requests, 200)))
    first, same, other = batches
    assert first == same != other
    assert {request.prompt_tokens for request in first} == {5, 6, 7, 8, 9}
    assert {request.output_tokens for request in first} == {2}
    assert {request.service.service_class for request in first} == {ServiceClass.BATCH}
    for wrong, reason in (
        ("{least: 9, most: 5}", "has 'least' above 'most'"),
        ("{least: 9}", "'most' is missing"),
        ("0", "'least'"),
    ):
        path = write(tmp_path, CO_SERVED.replace("prompt: 300", f"prompt: {wrong}"))
        with pytest.raises(ConfigError, match=reason):
            read_simulation(path, None)
