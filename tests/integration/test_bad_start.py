"""Invalid configurations end `tideserve up` with one sentence and no remaining process.

Errors of the command itself are tested in tests/component/tideserve/cli/test_up.py, those of the
model loader in tests/component/test_load_failures.py; here errors pass from a service to the user.
"""

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model

EXIT_UNUSABLE = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def damaged(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a bit that differs from its manifest."""
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("damaged") / "model")
    weights = folder / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  model.safetensors\n")
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    return folder


def fail_to_start(**options: Any) -> str:
    """The output of `tideserve up`, which must exit by itself with code 2."""
    cluster = Cluster(workers=1, **options)
    try:
        cluster.start()
        assert cluster.wait() == EXIT_UNUSABLE, cluster.tail()
        assert not cluster.wait_until_gone()
        output = cluster.output()
    finally:
        cluster.kill_all()
        shutil.rmtree(cluster.folder, ignore_errors=True)
    assert "Traceback" not in output
    return " ".join(output.split())


@pytest.fixture(scope="module")
def outputs(tiny: Path, damaged: Path) -> dict[str, str]:
    """The outputs of failing starts, run concurrently, as imports dominate."""
    starts: dict[str, dict[str, Any]] = {
        "memory": {"model_dir": tiny, "memory": "1MiB"},
        "damage": {"model_dir": damaged},
        "setting": {"model_dir": tiny, "worker": {"max_batch_tokens": 0}},
    }
    with ThreadPoolExecutor() as pool:
        outputs = pool.map(lambda options: fail_to_start(**options), starts.values())
        return dict(zip(starts, outputs, strict=True))


def test_too_little_memory_reports_the_required_amount(outputs: dict[str, str]) -> None:
    output = outputs["memory"]
    assert "MiB" in output and "at least" in output and "memory" in output


def test_a_flipped_bit_is_detected_by_the_manifest(outputs: dict[str, str]) -> None:
    assert "model.safetensors" in outputs["damage"] and "SHA256SUMS" in outputs["damage"]


def test_a_worker_setting_out_of_range(outputs: dict[str, str]) -> None:
    assert "max_batch_tokens" in outputs["setting"] and "must be 1 to" in outputs["setting"]
