"""Host memory for KV in the checks of `tideserve up`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.core.setting import AUTO_BYTES
from tideserve.cli import host, host_memory
from tideserve.cli.cluster_options import ClusterOptions, read_options
from tideserve.cli.errors import CommandError
from tideserve.cli.host import shortages
from tideserve.cli.host_memory import describe_host_memory, host_memories, with_host_memory
from tideserve.cli.model_list import ListedModel
from tideserve.cli.service_config import Placement, service_configs

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 GiB, of which 12 are available."""
    monkeypatch.setattr(host_memory, "limit_bytes", lambda: 16 * GIB)
    for module in (host, host_memory):
        monkeypatch.setattr(module, "available_bytes", lambda: 12 * GIB)


def options(**changes: Any) -> ClusterOptions:
    return ClusterOptions(**({"workers": 2, "memory": GIB} | changes))


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 0),
        ({"host_memory": 0}, 0),
        ({"host_memory": 3 * GIB}, 3 * GIB),
        # At most a quarter of what is available, for two workers together.
        ({"host_memory": AUTO_BYTES, "memory": 4 * GIB}, 3 * GIB // 2),
        ({"host_memory": AUTO_BYTES}, GIB),
    ],
)
def test_host_memory_is_divided_among_workers(changes: dict[str, Any], size: int) -> None:
    assert host_memories(with_host_memory(options(**changes))) == [size, size]


def test_host_memory_beyond_the_container_is_refused() -> None:
    with pytest.raises(CommandError, match=r"--host-memory 8GiB of 2 workers and their --memory"):
        with_host_memory(options(host_memory=8 * GIB))
    gpu = options(host_memory=8 * GIB, device="cuda", memory=70 * GIB)
    assert with_host_memory(gpu) == gpu


@pytest.mark.parametrize("size", ["8GiB", 8 * GIB])
@pytest.mark.parametrize("section", ["worker", "services"])
def test_the_section_of_a_file_counts(section: str, size: str | int) -> None:
    """It overrides the option; without it, a cluster beyond the limit would start and be killed."""
    with pytest.raises(CommandError, match=r"'host_memory' 8GiB of 2 workers and their --memory"):
        with_host_memory(options(**{section: {"host_memory": size}}))
    less = with_host_memory(options(host_memory=8 * GIB, worker={"host_memory": "1GiB"}))
    assert host_memories(less) == [GIB, GIB] and describe_host_memory(less) == "1GiB each"


def test_auto_in_a_section_is_divided_among_the_workers() -> None:
    chosen = with_host_memory(options(memory=4 * GIB, worker={"host_memory": "auto"}))
    configs = service_configs(chosen, Placement(Path("/m"), "m", "http://e:1", Path("/run")))
    assert [configs[f"worker-{n}"]["host_memory"] for n in (0, 1)] == [3 * GIB // 2] * 2


def test_models_have_host_memory_of_their_own() -> None:
    small = ListedModel(model="a", workers=2, worker={"host_memory": "auto"})
    large = ListedModel(model="b", worker={"host_memory": "3GiB"})
    listed = with_host_memory(options(workers=3, listed_models=(small, large)))
    assert host_memories(listed) == [GIB, GIB, 3 * GIB]
    assert describe_host_memory(listed) == "1GiB to 3GiB each"
    large = replace(large, worker={"host_memory": "13GiB"})
    with pytest.raises(CommandError, match=r"3 workers and their memory need 18.0 GiB"):
        with_host_memory(options(workers=3, listed_models=(small, large)))


def test_without_host_memory_there_is_nothing_to_describe() -> None:
    assert describe_host_memory(options()) == ""


def test_models_count_with_their_own_memory() -> None:
    small, large = ListedModel(model="a", workers=2), ListedModel(model="b", memory=7 * GIB)
    listed = options(workers=3, listed_models=(small, large), host_memory=2 * GIB)
    assert listed.memories == [GIB, GIB, 7 * GIB]
    assert host_memories(with_host_memory(listed)) == [2 * GIB] * 3
    with pytest.raises(CommandError, match=r"3 workers and their memory need 18.0 GiB"):
        with_host_memory(replace(listed, host_memory=3 * GIB))
    assert host_memories(with_host_memory(replace(listed, host_memory=AUTO_BYTES))) == [GIB] * 3


def test_a_shortage_names_the_settings_to_lower(tmp_path: Path) -> None:
    assert shortages("cpu", 8 * GIB, 4 * GIB, tmp_path) == []
    (warning,) = shortages("cpu", 8 * GIB, 5 * GIB, tmp_path)
    assert "13.0 GiB together" in warning
    assert "lower --memory, --host-memory or --workers" in warning
    (warning,) = shortages("cuda", 80 * GIB, 13 * GIB, tmp_path)
    assert "13.0 GiB together" in warning and "lower --host-memory or --workers" in warning
    (warning,) = shortages("cpu", 13 * GIB, 0, tmp_path)
    assert "lower --memory or --workers" in warning


def test_the_flag_reaches_the_workers() -> None:
    chosen = read_options(None, {"host_memory": "2GiB", "workers": 1})
    configs = service_configs(chosen, Placement(Path("/m"), "m", "http://e:1", Path("/run")))
    assert configs["worker-0"]["host_memory"] == 2 * GIB
    unset = service_configs(options(), Placement(Path("/m"), "m", "http://e:1", Path("/run")))
    assert "host_memory" not in unset["worker-0"]


def test_swap_copies_the_kv_of_all_requests() -> None:
    placement = Placement(Path("/m"), "m", "http://e:1", Path("/run"))
    chosen = read_options(None, {"overload_policy": "swap", "host_memory": "1GiB"})
    configs = service_configs(chosen, placement)
    assert configs["memmgr"]["overload_policy"] == "swap"
    worker = configs["worker-0"]
    assert (worker["save"], worker["save_from"], worker["host_memory"]) == ("all", 0.0, GIB)
    given = read_options(
        None, {"overload_policy": "swap", "host_memory": "1GiB", "worker": {"save_from": 0.5}}
    )
    assert service_configs(given, placement)["worker-0"]["save_from"] == 0.5
    other = service_configs(read_options(None, {"host_memory": "1GiB"}), placement)
    assert "save" not in other["worker-0"]


def test_swap_without_host_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="'host_memory' is 0; set it, for example to auto"):
        read_options(None, {"overload_policy": "swap"})


@pytest.mark.parametrize("size", ["0", "1GiB"])
def test_swap_needs_the_host_memory_of_any_model(tmp_path: Path, size: str) -> None:
    """That of a model's section counts, as does a section that sets it to zero."""
    listed = tmp_path / "models.yaml"
    listed.write_text(
        "models:\n"
        "  - {model: a}\n"
        f"  - {{model: b, workers: 2, worker: {{host_memory: {size}}}}}\n"
    )
    flags = {"models": str(listed), "overload_policy": "swap"}
    if size == "0":
        with pytest.raises(ConfigError, match="'host_memory' is 0; set it, for example to auto"):
            read_options(None, flags)
    else:
        assert host_memories(read_options(None, flags)) == [0, GIB, GIB]
    # The option reaches the first model.
    assert read_options(None, flags | {"host_memory": "2GiB"}).swaps


def test_a_section_without_host_memory_overrides_the_option() -> None:
    flags = {"overload_policy": "swap", "host_memory": "1GiB", "worker": {"host_memory": "0"}}
    with pytest.raises(ConfigError, match="'host_memory' is 0"):
        read_options(None, flags)
