"""`tideserve simulate`: examples that load, figures as JSON, one sentence for each bad key."""

import json
from pathlib import Path

import pytest

from tideserve.cli.errors import CommandError
from tideserve.cli.simulate import run_simulation, simulate
from tideserve.cli.simulation_options import read_simulation
from tideserve.sim.report import figures

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
    found = figures(simulate(prepared, "recompute"))
    assert found["kv_demand_peak_ratio"] > 1.2
    assert found["preemptions"] > 0


def test_figures_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, written = write(tmp_path, SMALL + WORKLOAD), tmp_path / "figures.json"
    run_simulation(path, 3, written)
    text = capsys.readouterr().out
    assert "time to first token" in text and "simulated, not measured" in text
    result = json.loads(written.read_text())
    found = result["systems"]["simulated"]
    assert found["completed"] == found["sent"] > 20
    assert 0.02 < found["ttft_s"]["p50"] < found["ttft_s"]["p99"] <= found["ttft_s"]["max"]
    assert result["config"]["seed"] == 3
    run_simulation(path, 3, written)
    assert json.loads(written.read_text())["systems"] == result["systems"]


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
    "max_running: 4000": "max_running is 4000",
    "delays: {ask_s: -1}": "'ask_s'",
    "delays: {aks_s: 1}": "did you mean 'ask_s'",
    "workload: {kind: gama}": "must be one of gamma",
    "workload: {kind: gamma}": "'rate_per_s' is missing",
    "workload: {kind: gamma, rate_per_s: 1, cvs: 2}": "did you mean 'cv'",
    "workload: {kind: gamma, rate_per_s: 1, prompt: {mean: 5, least: 9, most: 3}}": "'least'",
    "workload: {kind: trace, path: nowhere.csv}": "cannot read the trace",
    "workload: 3": "must be of type dict",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence(tmp_path: Path, line: str) -> None:
    text = SMALL + (line if line.startswith("workload") else WORKLOAD)
    key = line.split(":")[0]
    kept = [one for one in text.splitlines() if not one.startswith(f"{key}:")]
    path = write(tmp_path, "\n".join([*kept, line]))
    with pytest.raises(CommandError, match=BAD[line].replace("(", r"\(")) as raised:
        run_simulation(path, None, None)
    assert "\n" not in str(raised.value)


def test_a_missing_file_and_a_device_without_sizes(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot read"):
        run_simulation(tmp_path / "none.yaml", None, None)
    with pytest.raises(CommandError, match="give 'kv_blocks'"):
        run_simulation(write(tmp_path, f"{COST}\n{WORKLOAD}"), None, None)
    little = f"profile: A100-14B\nmemory: 20GiB\n{WORKLOAD}"
    with pytest.raises(CommandError, match="leaves no KV block"):
        run_simulation(write(tmp_path, little), None, None)


def test_malformed_rows_of_a_trace_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,9,4\nx,y,z\n"
    (tmp_path / "trace.csv").write_text(rows)
    run_simulation(write(tmp_path, SMALL + "workload: {kind: trace, path: trace.csv}"), None, None)
    said = capsys.readouterr()
    assert "1 malformed rows skipped (line 3)" in " ".join((said.out + said.err).split())
