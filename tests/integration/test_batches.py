"""Batches in a whole cluster: the command, with concurrent online requests."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batches import as_file, chat_lines
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=8)
    with Cluster(model_dir=folder, model_name="m", memory="32MiB") as running:
        yield running


def command(cluster: Cluster, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `tideserve batch`."""
    program = [sys.executable, "-m", "tideserve.cli.commands.main", "batch"]
    return subprocess.run(
        [*program, *map(str, arguments), "--url", cluster.url],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=240,
        check=False,
    )


def test_the_command_submits_shows_and_writes(cluster: Cluster, tmp_path: Path) -> None:
    lines = chat_lines(20)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(as_file(lines))
    submitted = command(cluster, "submit", source, "--wait", "-o", target)
    assert submitted.returncode == 0, submitted.stderr
    batch_id = submitted.stdout.split()[0]
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    shown = json.loads(command(cluster, "status", batch_id, "--json").stdout)
    assert shown["status"] == "completed" and shown["request_counts"]["completed"] == 20
    assert batch_id in command(cluster, "status").stdout
    assert command(cluster, "results", batch_id).stdout == target.read_text()


def test_the_command_names_the_invalid_lines(cluster: Cluster, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(as_file([*chat_lines(2), *chat_lines(1)]))
    submitted = command(cluster, "submit", source, "--wait")
    assert submitted.returncode == 1
    assert "line 3" in submitted.stderr and "custom_id" in submitted.stderr


def test_a_cancelled_batch_is_shown_as_such(cluster: Cluster, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(as_file(chat_lines(2000, max_tokens=500, ignore_eos=True)))
    batch_id = command(cluster, "submit", source).stdout.strip()
    assert "cancel" in command(cluster, "cancel", batch_id).stdout
    state = cluster.eventually(
        lambda: (row := cluster.get(f"/v1/batches/{batch_id}"))["status"] == "cancelled" and row
    )
    assert state["request_counts"]["total"] in (0, 2000)
