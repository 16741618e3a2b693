"""`tideserve profile` on a tiny model, a cluster that profiles itself, and a paced cluster."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from services.common.device_profile import load_profile
from services.common.event_log import read_config, read_entries
from services.core.changeover.state import Changeover, MemberConfig
from services.core.planner.events import BlocksBorrowed
from services.core.scheduler.vocabulary import GroupJoined
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.tiny_models import make_tiny_model
from tideserve.sim.replay import SCHEDULER_TYPES, WORKER_TYPES, replay

PROFILE_TIMEOUT_S = 280
IDLE_PROFILE_TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), dtype=torch.float32, max_model_len=1024
    )


def tideserve_profile(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tideserve.cli.commands.main", "profile", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "TIDESERVE_CACHE": str(cache),
        },
        capture_output=True,
        text=True,
        timeout=PROFILE_TIMEOUT_S,
        check=False,
    )


def test_profile_measures_reports_and_stores(model_dir: Path, tmp_path: Path) -> None:
    options = ("--model", str(model_dir), "--dtype", "float32", "--memory", "64MiB", "--quick")
    done = tideserve_profile(tmp_path, *options, "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["rounds"] >= 5
    assert {row["kind"] for row in result["kinds"]} >= {"prefill", "prefill after prefix"}
    held_out = [point for point in result["points"] if point["held_out"]]
    errors = [abs(p["predicted_s"] / p["measured_s"] - 1) for p in held_out]
    assert sum(errors) / len(errors) == pytest.approx(result["error"])
    assert result["error_max"] == max(0.05, 1.5 * result["noise"])
    profile = load_profile(Path(result["path"]))
    assert Path(result["path"]).is_relative_to(tmp_path / "profiles")
    assert profile.accuracy is not None
    assert profile.accuracy.error == pytest.approx(result["error"])
    for point in result["points"]:
        chunks = [tuple(chunk) for chunk in point["chunks"]]
        assert profile.model.batch_s(chunks) == pytest.approx(point["predicted_s"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "much"), "is not a size"),
        (("--memory", "1MiB"), "memory budget"),
        (("--device", "cuda:0"), "CPU-only build"),
        (("--model", "/no/such/folder"), "/no/such/folder"),
    ],
)
def test_an_impossible_profile_is_refused_in_one_sentence(
    model_dir: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    model = () if "--model" in arguments else ("--model", str(model_dir))
    done = tideserve_profile(tmp_path, *model, *arguments, "--quick")
    assert done.returncode == 2
    assert done.stderr.startswith("tideserve: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.yaml"))


def complete(cluster: Cluster, max_tokens: int) -> float:
    """Duration of a completion of `max_tokens` tokens, in seconds."""
    with httpx.Client(base_url=cluster.url, timeout=60.0) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "prompt": "tide",
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "temperature": 0,
        }
        started_s = time.monotonic()
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return time.monotonic() - started_s


@pytest.mark.cluster
def test_a_worker_without_a_profile_measures_one_when_idle(model_dir: Path, tmp_path: Path) -> None:
    """The worker and dispatch use the profile at once; the worker's log replays."""
    logs = tmp_path / "logs"
    with Cluster(
        model_dir=model_dir,
        workers=1,
        environment={"TIDESERVE_CACHE": str(tmp_path)},
        worker={"profile_when_idle": True, "max_running": 16, "max_batch_tokens": 128},
        services={"event_log": str(logs)},
    ) as cluster:
        complete(cluster, 2)
        cluster.eventually(
            lambda: "profiled while idle" in cluster.log("worker-0") or None,
            IDLE_PROFILE_TIMEOUT_S,
        )
        complete(cluster, 2)
        refused = "nothing is stored" in cluster.log("worker-0")
        origin = "start" if refused else "idle"
        cluster.eventually(lambda: [row["cost_model"] for row in cluster.workers()] == [origin])
    stored = list(tmp_path.glob("profiles/*.yaml"))
    assert len(stored) == (0 if refused else 1), "only figures of a quiet machine are stored"
    (log,) = logs.glob("worker-*")
    entries = list(read_entries(log, WORKER_TYPES))
    assert any(isinstance(entry.value, BlocksBorrowed) for entry in entries)
    state = Changeover.of(read_config(log, MemberConfig))
    assert replay(state, entries).difference == ""
    (log,) = logs.glob("scheduler-*")
    events = [entry.value for entry in read_entries(log, SCHEDULER_TYPES)]
    joined = [event.group for event in events if isinstance(event, GroupJoined)]
    assert joined and all(group.cost_model is not None for group in joined)
    for path in stored:
        assert load_profile(path).accuracy is not None
        assert state.planner.config.cost_model == load_profile(path).model


@pytest.mark.cluster
def test_paced_iterations_take_the_profiled_time(model_dir: Path, tmp_path: Path) -> None:
    profile = tmp_path / "slow.yaml"
    profile.write_text(
        "name: slow device\nsource: a test\n"
        "cost: {alpha_s: 0.0, beta_s: 0.0, gamma_s: 0.1, lambda_s: 0.1}\n"
    )
    with Cluster(model_dir=model_dir, workers=1, paced=str(profile)) as cluster:
        assert complete(cluster, 20) >= 20 * 0.1
        workers = cluster.status()["workers"]
        assert [worker["paced"] for worker in workers] == [str(profile)]
        assert "PACED" in cluster.output()
        assert "PACED" in cluster.log("worker-0")
