"""The chart's `worker.hostMemory` reaches the worker, and its pod's memory grows by it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_objects import DEPLOY, ToolMissing, parsed, run_tool
from deploy_tools import renderer

CHART = DEPLOY / "helm" / "tideserve"
RENDER_TIMEOUT_S = 60


def worker_of(tmp_path: Path, values: dict[str, Any]) -> Any:
    """The worker container for these values."""
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    try:
        program = renderer()
    except ToolMissing as error:
        pytest.skip(f"the renderer of charts is missing: {error}")
    command = [str(program), str(CHART), str(path)]
    text = run_tool(command, "the chart cannot be rendered", RENDER_TIMEOUT_S)
    (worker,) = [
        manifest
        for manifest in parsed(text)
        if manifest["kind"] in ("Deployment", "StatefulSet")
        and "worker" in manifest["metadata"]["name"]
    ]
    return worker["spec"]["template"]["spec"]["containers"][0]


def test_the_pod_of_a_worker_grows_by_its_host_memory(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, {"worker": {"hostMemory": "8Gi"}})
    assert {"name": "TIDESERVE__HOST_MEMORY", "value": "8GiB"} in worker["env"]
    resources = worker["resources"]
    assert resources["limits"]["memory"] == f"{(4 + 8) * 1024}Mi"
    assert resources["requests"] == {"cpu": "1", "memory": f"{(2 + 8) * 1024}Mi"}


def test_without_host_memory_nothing_changes(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, {})
    assert all(variable["name"] != "TIDESERVE__HOST_MEMORY" for variable in worker["env"])
    assert worker["resources"]["limits"] == {"memory": "4Gi"}
