"""The options of `tideserve serve`: those of `up`, and defaults by the device."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.common import host_memory
from tideserve.cli import host, option_checks
from tideserve.cli.cluster_options import ClusterOptions
from tideserve.cli.commands import serve
from tideserve.cli.commands.main import app
from tideserve.cli.errors import CommandError

GIB = 2**30


def options_of(config: Path | None = None, part: float | None = None, **flags: Any) -> Any:
    return serve.serve_options(config, flags, part)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The memory of the machine's GPUs, which a test changes."""
    sizes = [80 * GIB, 40 * GIB]
    monkeypatch.setattr(host, "gpu_memory_bytes", lambda: sizes)
    monkeypatch.setattr(option_checks, "version", lambda name: "2.13.0+cu130")
    return sizes


def test_flags_of_vllm_set_the_options_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[ClusterOptions] = []
    monkeypatch.setattr(serve, "run", lambda options, with_parent: chosen.append(options()))
    command = (
        "serve org/name --served-model-name mine --max-num-seqs 8 --max-num-batched-tokens 64"
        " --max-model-len 100 --host 0.0.0.0 --port 9 --dtype float32 --api-key secret"
    )
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    (options,) = chosen
    assert (options.model, options.model_name, options.api_key) == ("org/name", "mine", "secret")
    assert (options.max_running, options.max_batch_tokens, options.max_model_len) == (8, 64, 100)
    assert (options.host, options.port, options.dtype) == ("0.0.0.0", 9, "float32")


def test_serve_without_flags_equals_up() -> None:
    assert options_of() == ClusterOptions()


def test_the_memory_of_this_machine_is_divided_among_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "limit_bytes", lambda: 16 * GIB)
    assert options_of(part=0.5).memory == 4 * GIB
    assert options_of(part=0.5, workers=1).memory == 8 * GIB
    assert options_of(part=0.3).memory == 2457 * 2**20, "whole MiB are easier to read"


class FakeDriver:
    """Responds as libcuda with two GPUs."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 10 + ordinal
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: Any) -> int:
        total._obj.value = device.value * GIB
        return 0


def test_gpu_memory_is_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeDriver())
    assert host.gpu_memory_bytes() == [10 * GIB, 11 * GIB]


def test_each_gpu_gets_a_worker_with_the_memory_of_the_smallest(gpus: list[int]) -> None:
    options = options_of(device="cuda")
    assert (options.workers, options.memory) == (2, int(0.9 * 40 * GIB))
    assert options_of(device="cuda", part=0.5).memory == 20 * GIB


def test_workers_on_one_gpu_share_its_memory(gpus: list[int]) -> None:
    assert options_of(device="cuda:0").workers == 1
    assert options_of(device="cuda:0", part=0.5).memory == 40 * GIB
    assert options_of(device="cuda:1", workers=2, part=0.5).memory == 10 * GIB


def test_the_file_takes_precedence_over_the_defaults_of_a_gpu(
    gpus: list[int], tmp_path: Path
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("workers: 1\nmemory: 3GiB\nworker: {device: cuda}\n")
    options = options_of(config)
    assert (options.workers, options.memory) == (1, 3 * GIB)
    assert options_of(config, part=0.25).memory == 10 * GIB


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_gpu_that_the_driver_lacks_is_an_error(gpus: list[int], device: str) -> None:
    if device == "cuda":
        gpus.clear()
    with pytest.raises(CommandError, match=f"no device {device}"):
        options_of(device=device)


def test_memory_is_set_once() -> None:
    arguments = ["serve", "--memory", "1GiB", "--gpu-memory-utilization", "0.5"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, CommandError)
    assert "set only one" in str(result.exception)
