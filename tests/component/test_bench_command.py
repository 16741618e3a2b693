"""`tideserve bench` as a command, against a running server."""

import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import run as cli_bench
from benchmarks.run import BenchArguments, run_bench
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.systems.system import Deployment
from tests.support.fake_openai import fake_openai
from tests.support.refusing_address import refusing_address
from tideserve.cli import option_checks
from tideserve.cli.commands.main import main
from tideserve.cli.local_cluster import python_environment
from tideserve.cli.tiny_model import DEEP
from tideserve.load.workload import TOKEN_ID_MAX, TOKEN_ID_MIN

TIMEOUT_S = 240.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's until it is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tideserve.cli.commands.main", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=python_environment(),
        check=False,
    )


def test_a_server_is_measured(tmp_path: Path, model: Path) -> None:
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    with fake_openai() as server:
        done = bench(
            *("steady", "--quick", "--systems", f"mine={server.url}", "--model", model),
            *("--json", figures, "--plot", picture),
        )
    assert done.returncode == 0, done.stderr
    assert "3 rounds of 1 systems" in done.stdout
    result = json.loads(figures.read_text())
    assert set(result) >= {"scenario", "machine", "config", "systems", "ratios"}
    mine = result["systems"]["mine"]
    assert mine["sent"] == mine["completed"] >= 200
    assert mine["rejected"] == mine["failed"] == 0
    for latency in ("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s"):
        assert {"mean", "p50", "p90", "p95", "p99", "p99.9", "max"} == set(mine[latency])
    assert mine["classes"]["standard"]["sent"] == mine["sent"]
    assert "steady/prefill" in result["scenarios"] and result["pairs"] == {}
    assert isinstance(result["machine"]["cpu_flags"], list)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_system_that_cannot_run_fails_the_exit_code(tmp_path: Path, model: Path) -> None:
    """The other system is still measured and reported."""
    figures = tmp_path / "out.json"
    with fake_openai() as server, fake_openai() as broken:
        broken.behaviour = dict.fromkeys(range(TOKEN_ID_MIN, TOKEN_ID_MAX + 1), 500)
        done = bench(
            *("steady", "--quick", "--systems", f"good={server.url},bad={broken.url}"),
            *("--model", model, "--json", figures),
        )
    assert done.returncode == 1
    assert "these systems could not run: bad" in done.stderr
    result = json.loads(figures.read_text())
    assert result["systems"]["good"]["completed"] >= 200
    assert "HTTP 500" in result["unavailable"]["bad"]


def test_an_impossible_command_is_refused_in_one_sentence(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs in this process, as a new process takes two seconds."""
    empty = tmp_path / "empty.csv"
    empty.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n")
    figures = tmp_path / "no" / "out.json"
    with refusing_address() as address:
        unreachable = f"a=http://{address}"
        cases: list[tuple[list[str | Path], str]] = [
            (["tsunami"], "unknown scenario 'tsunami'"),
            (["steady", "--systems", unreachable, "--model", model], "no server answers at"),
            (["burst", "--trace", empty], "has no usable row (1 malformed)"),
            (["burst", "--paced", "A100-14B", "--systems", "drop,vllm"], "vllm cannot serve it"),
            (["steady", "--paced", "A100-14B"], "'steady' has no load for --paced's tiny model"),
            (["steady", "--json", figures, "--model", model], "cannot write to"),
            (["coserve", "--trace", "x"], "'coserve' does not use --trace; leave it out"),
            (["faults", "--quick", "--minutes", "3"], "--minutes alone runs random faults"),
            (["flood", "--device", "cpu"], "'flood' does not use --device; leave it out"),
            (["steady", "--ablation"], "'steady' does not use --ablation; leave it out"),
            (["burst", "--rate", "3", "--time-scale", "1"], "give only one"),
            (["steady", "--plot", "out.doc", "--model", model], "must end in one of .png"),
            (["burst", "--dtype", "float16"], "'float16', but must be one of bfloat16"),
            (["churn", "--workers", "0"], "'workers' in the command line is 0"),
            (
                ["churn", "--load-format", "auto"],
                "the tiny model has random weights; leave --load-format out",
            ),
            (["steady", "--load-format", "dummy"], "no weights, so vllm cannot serve it"),
        ]
        left = tmp_path / "left.json"
        cases.append((["tsunami", "--json", left], "unknown scenario"))
        for arguments, sentence in cases:
            assert sentence in refused(arguments, monkeypatch, capsys)
    assert not left.exists()


def refused(
    arguments: Sequence[str | Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """The line in which the command explains why it does not start."""
    monkeypatch.setattr(sys, "argv", ["tideserve", "bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2, arguments
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    return error


def test_an_impossible_command_for_a_gpu_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(option_checks, "version", lambda name: "2.13.0+cu130")
    on_gpu = ["burst", "--device", "cuda:0", "--model", str(model)]
    cases = {
        ("--systems", "drop,vllm"): "vllm is started on processors only",
        (): "the --memory per worker",
        ("--systems", "drop-chunking"): "leave the suffix out",
        ("--systems", "mine=http://x"): "no system of this run is tideserve",
        ("--systems", "drop,recompute-ample"): "leave systems with -ample out",
        ("--memory", "16GiB", "--cells", "x"): "does not use --cells",
    }
    for more, sentence in cases.items():
        assert sentence in refused([*on_gpu, *more], monkeypatch, capsys)
    paced = refused(["burst", "--device", "cuda", "--paced", "A100-14B"], monkeypatch, capsys)
    assert "--paced with the tiny model runs on processors; leave --device out" in paced


def test_a_trial_serves_a_tiny_model_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Deployment] = []

    def run(deployment: Deployment, *_: object) -> TrialVerdict:
        seen.append(deployment)
        return TrialVerdict({}, [("noted", "once")], ())

    scenario = Scenario("churn", "32MiB", run=run, tiny_model=DEEP, gpu_memory="64MiB")
    monkeypatch.setattr(option_checks, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr(cli_bench, "find_scenario", lambda name: scenario)
    for device in ("cpu", "cuda:0"):
        run_bench(BenchArguments("churn", LoadChoice(on_gpu=device != "cpu"), device=device))
    assert [each.device for each in seen] == ["cpu", "cuda:0"]
    assert [each.memory_bytes >> 20 for each in seen] == [32, 64]
    assert {each.options["load_format"] for each in seen} == {"dummy"}
