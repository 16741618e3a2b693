"""What cannot be served ends `tideserve up` with one sentence; no process is left.

What the command itself can see is tested in tests/component/cli/test_up.py, what the model loader
finds in tests/component/test_load_failures.py; here is the way from a service to the person.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model

EXIT_UNUSABLE = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(tiny, tmp_path / "model")


def fail_to_start(**options: Any) -> str:
    """What `tideserve up` printed before it ended, which it must do by itself with code 2."""
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


def test_too_little_memory_says_how_much_is_needed(tiny: Path) -> None:
    output = fail_to_start(model_dir=tiny, memory="1MiB")
    assert "MiB" in output and "at least" in output and "memory" in output


def test_a_flipped_bit_is_found_by_the_manifest(copy: Path) -> None:
    weights = copy / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (copy / "SHA256SUMS").write_text(f"{digest}  model.safetensors\n")
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    output = fail_to_start(model_dir=copy)
    assert "model.safetensors" in output and "SHA256SUMS" in output


def test_a_worker_setting_out_of_range(tiny: Path) -> None:
    output = fail_to_start(model_dir=tiny, worker={"max_batch_tokens": 0})
    assert "max_batch_tokens" in output and "must be 1 to" in output
