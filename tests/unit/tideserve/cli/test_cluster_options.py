"""Options of a cluster: file, flags, and the configuration of every service."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig
from tideserve.cli import option_checks
from tideserve.cli.cluster_options import ClusterOptions, read_options
from tideserve.cli.errors import CommandError
from tideserve.cli.model_list import PlacedModel
from tideserve.cli.service_config import Placement, service_configs
from tideserve.cli.vllm_install import CPU_BUILD, chosen_python, vllm_python

PLACEMENT = Placement(
    model_dir=Path("/models/tiny"),
    model_name="tiny",
    etcd_url="http://127.0.0.1:2379",
    run_dir=Path("/run/tideserve-x"),
)


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_only_given_flags_override_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "workers: 3\nport: 9000\nmemory: 1048576\n")
    options = read_options(path, {"workers": 5, "port": None, "api_key": None})
    assert (options.workers, options.port, options.memory) == (5, 9000, 2**20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memroy: 1GiB", "did you mean 'memory'"),
        ("memory_bytes: 1GiB", "did you mean 'memory'"),
        ("prefix_caching: true", r"a key of section 'worker': write `worker: {prefix_caching: …}`"),
        ("dispatch: prefix", "a key of section 'scheduler': write"),
        ("overtaken_max: 1", "a key of section 'scheduler' or 'worker': write"),
        ("log_level: debug", "a key of section 'services': write"),
        ("workers: 0", "must be 1 to"),
        ("workers: many", "must be of type int"),
        ("memory: much", "'memory' in .*cluster.yaml: 'much' is not a size"),
        ("chunk_size: -1", "chunk_size"),
        ("chunk_size: 5000", "'chunk_size' in .* is 5000, but must be a multiple of the page size"),
        ("device: gpu", "must be cpu, cuda or cuda:N"),
        ("device: 'cuda:x'", "must be cpu, cuda or cuda:N"),
        ("scheduler: {dispatch: best}", "'dispatch' in section 'scheduler' of .*cluster.yaml is"),
        ("services: {metrics_port: 70000}", "section 'services' of .*cluster.yaml is 70000"),
        ("max_model_len: 0", "must be 1 to"),
        ("engine: llama", "must be one of tideserve, vllm"),
        ("paced: B200-14B", "unknown device profile 'B200-14B'"),
        ("dtype: float16", "must be one of bfloat16, float32, float64"),
        ("worker: {run_dir: /tmp}", "cannot be set in section 'worker'"),
        ("gateway: {1: 2}", "must be text"),
        ("gateway: 3", "must be of type dict"),
        ("api_key: ''", "empty"),
        ("roles: prefill=0,decode=1", "'roles': 'prefill=0,decode=1' is not mixed, auto or"),
        ("memmgr: {roles: both}", "'roles': 'both' is not mixed, auto or"),
        ("roles: auto\nengine: vllm", "'roles' is auto, but workers with engine vllm hand over no"),
        ("roles: auto\nworker: {prefix_caching: false}", "only with 'prefix_caching'; correct"),
        ("roles: auto\nscheduler: {dispatch: kv_share}", "only dispatch prefix follows roles"),
        ("roles: auto\nworkers: 1", "no model has two workers; .* set 'roles' to mixed"),
        ("[1, 2]", "must contain a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_invalid_options_are_a_short_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read_options(write(tmp_path, text), {})


def test_a_bad_flag_names_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the command line"):
        read_options(write(tmp_path, ""), {"port": 70000})


def test_every_service_gets_only_its_own_options() -> None:
    options = ClusterOptions(
        workers=2, port=8100, memory=2**26, api_key="secret", queue_limit=7, chunk_size=2**16
    )
    configs = service_configs(options, PLACEMENT)
    assert list(configs) == ["memmgr", "scheduler", "gateway", "worker-0", "worker-1"]
    assert configs["memmgr"] == {"etcd_url": PLACEMENT.etcd_url}
    assert configs["scheduler"] == {"etcd_url": PLACEMENT.etcd_url, "queue_limit": 7}
    assert configs["gateway"]["expected_workers"] == 2
    assert configs["gateway"]["expected_wait_s"] == options.ready_timeout_s
    holders = [name for name, config in configs.items() if "secret" in config.values()]
    assert holders == ["gateway"]
    worker = configs["worker-1"]
    assert worker["worker_id"] == "worker-1"
    assert worker["run_dir"] == "/run/tideserve-x/worker-1"
    assert (worker["memory_bytes"], worker["chunk_bytes"]) == (64 * 2**20, 64 * 2**10)
    assert "block_size" not in worker, "the service has its own default"


def test_sections_are_passed_on() -> None:
    sections: dict[str, Any] = {"worker": {"max_batch_tokens": 64}, "memmgr": {"lease_ttl_s": 3}}
    configs = service_configs(ClusterOptions(workers=1, lease_ttl=20, **sections), PLACEMENT)
    assert configs["worker-0"]["max_batch_tokens"] == 64
    assert (configs["memmgr"]["lease_ttl_s"], configs["scheduler"]["lease_ttl_s"]) == (3, 20)


def test_service_keys_override_common_keys() -> None:
    shared = {"etcd_user": "me", "etcd_ca_file": "ca.pem", "log_level": "debug"}
    options = ClusterOptions(
        etcd="https://a:1", services=shared, scheduler={"log_level": "error"}, workers=1
    )
    configs = service_configs(options, PLACEMENT)
    assert {config["etcd_user"] for config in configs.values()} == {"me"}
    assert {config["etcd_ca_file"] for config in configs.values()} == {str(Path.cwd() / "ca.pem")}
    assert [name for name, config in configs.items() if config["log_level"] == "error"] == [
        "scheduler"
    ]
    assert options.etcd_access("https://a:1") == {
        "etcd_url": "https://a:1",
        "etcd_user": "me",
        "etcd_ca_file": str(Path.cwd() / "ca.pem"),
    }


def test_the_key_file_is_relative_to_the_gateway_folder() -> None:
    configs = service_configs(ClusterOptions(workers=1, api_keys=Path("keys.jsonl")), PLACEMENT)
    assert configs["gateway"]["api_keys_file"] == str(Path.cwd() / "keys.jsonl")
    assert not any("api_keys_file" in configs[name] for name in configs if name != "gateway")


def test_a_user_for_the_builtin_etcd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("services: {etcd_user: me}")
    with pytest.raises(ConfigError, match="set option 'etcd' to the URL"):
        read_options(path, {})


def test_vllm_gets_its_python_and_time_to_start() -> None:
    options = ClusterOptions(workers=1, engine="vllm")
    placement = replace(PLACEMENT, engine_python=Path("/venv/bin/python"))
    worker = service_configs(options, placement)["worker-0"]
    assert (worker["engine"], worker["engine_python"]) == ("vllm", "/venv/bin/python")
    assert (options.ready_timeout_s, ClusterOptions().ready_timeout_s) == (1800, 600)
    assert replace(options, ready_timeout=7.0).ready_timeout_s == 7
    assert ClusterOptions(worker={"engine": "vllm"}).ready_timeout_s == 1800


def test_each_upstream_server_has_a_worker(tmp_path: Path) -> None:
    urls = ["http://a:8000", "http://b:8000"]
    options = read_options(None, {"upstream": urls, "upstream_key_file": Path("key")})
    assert (options.engine, options.workers, options.ready_timeout_s) == ("openai", 2, 600)
    configs = service_configs(options, PLACEMENT)
    workers = [configs[f"worker-{index}"] for index in range(2)]
    assert [worker["upstream_url"] for worker in workers] == urls
    assert all(worker["engine"] == "openai" for worker in workers)
    assert all("memory_bytes" not in worker for worker in workers)
    assert workers[0]["upstream_key_file"] == str(Path.cwd() / "key")
    assert configs["gateway"]["expected_workers"] == 2
    assert read_options(write(tmp_path, f"upstream: {urls}"), {"workers": 2}).workers == 2
    for key, value in (("workers", 3), ("engine", "vllm")):
        with pytest.raises(ConfigError, match=f"'{key}' is {value}, but with these upstream"):
            read_options(None, {"upstream": urls, key: value})


@pytest.mark.parametrize(
    ("chosen", "devices"),
    [
        ({}, ["cpu", "cpu"]),
        ({"device": "cuda"}, ["cuda:0", "cuda:1"]),
        ({"worker": {"device": "cuda"}}, ["cuda:0", "cuda:1"]),
        ({"device": "cuda:3"}, ["cuda:3", "cuda:3"]),
        ({"device": "cuda", "engine": "vllm"}, ["cuda:0", "cuda:1"]),
        (
            {
                **{"device": "cuda", "engine": "vllm"},
                "worker": {"engine_args": {"tensor-parallel-size": 2}},
            },
            ["cuda:0", "cuda:2"],
        ),
    ],
)
def test_each_worker_gets_a_gpu(chosen: dict[str, Any], devices: list[str]) -> None:
    configs = service_configs(ClusterOptions(workers=2, **chosen), PLACEMENT)
    assert [configs[f"worker-{index}"]["device"] for index in range(2)] == devices


@pytest.mark.parametrize("config", ["device: cuda", "worker: {device: 'cuda:1'}"])
def test_a_cpu_only_torch_is_reported_at_once(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(config)
    monkeypatch.setattr(option_checks, "version", lambda _name: "2.13.0+cpu")
    with pytest.raises(ConfigError, match=r"torch 2.13.0\+cpu is a CPU-only build"):
        read_options(path, {})
    read_options(path, {"engine": "vllm"})
    monkeypatch.setattr(option_checks, "version", lambda _name: "2.13.0")
    read_options(path, {})


def test_vllm_can_use_a_gpu(tmp_path: Path) -> None:
    read_options(write(tmp_path, "engine: vllm\ndevice: cuda\n"), {})


@pytest.mark.parametrize("place", ["", "worker"])
def test_the_python_of_vllm_is_configured_or_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def options(**keys: Any) -> ClusterOptions:
        return ClusterOptions(**({place: keys} if place else keys))

    monkeypatch.setenv("TIDESERVE_CACHE", str(tmp_path))
    assert chosen_python(options()) is None
    with pytest.raises(CommandError, match="run `tideserve engine install vllm` first"):
        chosen_python(options(engine="vllm"))
    given = chosen_python(options(engine="vllm", engine_python=Path("python")))
    assert given == Path.cwd() / "python"
    with pytest.raises(CommandError, match="add --engine vllm"):
        chosen_python(options(engine_python=Path("python")))
    python = vllm_python(tmp_path)
    python.parent.mkdir(parents=True)
    python.touch()
    (python.parent.parent / CPU_BUILD.stamp).touch()
    assert chosen_python(options(engine="vllm")) == python


def test_the_longest_context_is_passed_on() -> None:
    configs = service_configs(ClusterOptions(workers=1, max_model_len=512), PLACEMENT)
    assert configs["worker-0"]["max_model_len"] == 512


def test_processors_are_divided_among_workers() -> None:
    assert ClusterOptions(workers=64).threads_per_worker >= 1
    assert ClusterOptions(workers=2, threads=5).threads_per_worker == 5


@pytest.mark.parametrize(
    ("processors", "workers", "engine", "threads"),
    [
        (2, 1, "tideserve", 1),
        (15, 2, "tideserve", 1),
        (16, 2, "tideserve", 8),
        (2, 1, "vllm", 2),
        (1, 4, "vllm", 1),
    ],
)
def test_a_worker_with_few_processors_uses_a_single_compute_thread(
    monkeypatch: pytest.MonkeyPatch, processors: int, workers: int, engine: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(processors)))
    assert ClusterOptions(workers=workers, engine=engine).threads_per_worker == threads


def test_a_paced_profile_is_a_name_or_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_options(None, {"paced": "A100-14B"}).paced == "A100-14B"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nsource: a test\n"
        "cost: {alpha_s: 0.0, beta_s: 0.0, gamma_s: 0.1, lambda_s: 0.1}\n"
    )
    paced = read_options(None, {"paced": "mine.yaml"}).paced
    assert paced == str(tmp_path / "mine.yaml")
    assert read_options(None, {"paced": "mine.yaml:2"}).paced == f"{paced}:2"
    configs = service_configs(ClusterOptions(workers=1, paced=paced), PLACEMENT)
    assert configs["worker-0"]["paced"] == paced


def test_the_key_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-a-file\n")
    path = write(tmp_path, f"api_key_file: {tmp_path / 'key'}\n")
    assert read_options(path, {}).api_key == "of-a-file"
    assert read_options(path, {"api_key": "flag"}).api_key == "flag"
    with pytest.raises(ConfigError, match="'api_key' in the command line is empty"):
        read_options(None, {"api_key": " "})


def test_errors_of_sizes_and_files_name_their_place(tmp_path: Path) -> None:
    path = write(tmp_path, "memory: much\n")
    assert read_options(path, {"memory": "2GiB"}).memory == 2**31
    with pytest.raises(ConfigError, match="'memory' in the command line: 'x' is not a size"):
        read_options(None, {"memory": "x"})


MODELS = """
models:
  - {model: org/small, workers: 2, memory: 2GiB, aliases: [s], worker: {prefix_caching: false}}
  - {model: org/large@v1, name: big, max_model_len: 99, quota_weight: 4, tool_format: none}
"""


def test_roles_need_two_workers_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    flags = {"models": path, "roles": "prefill=1,decode=1"}
    path.write_text(MODELS)
    with pytest.raises(ConfigError, match="no model has two workers with 'prefix_caching'"):
        read_options(None, flags)
    path.write_text(MODELS.replace("prefix_caching: false", "prefix_caching: true"))
    options = read_options(None, flags)
    assert service_configs(options, PLACEMENT)["memmgr"]["roles"] == "prefill=1,decode=1"


def test_models_have_workers_and_keys_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(MODELS)
    options = read_options(None, {"models": path, "memory": 2**30})
    assert options.workers == 3
    placed = tuple(
        PlacedModel(model, model.name or "small", Path(f"/models/{index}"))
        for index, model in enumerate(options.listed_models)
    )
    configs = service_configs(options, replace(PLACEMENT, models=placed))
    gateway = configs["gateway"]
    assert not gateway.keys() & {"model_name", "model_dir", "expected_workers"}
    served = from_mapping(GatewayConfig, gateway, "test").served_models
    assert [(m.name, m.aliases, m.expected_workers) for m in served] == [
        ("small", ("s",), 2),
        ("big", (), 1),
    ]
    assert (served[1].quota_weight, served[1].tool_format) == (4, "none")
    workers = [configs[f"worker-{index}"] for index in range(3)]
    assert [w["model_name"] for w in workers] == ["small", "small", "big"]
    assert [w["model_dir"] for w in workers] == ["/models/0", "/models/0", "/models/1"]
    assert [w["memory_bytes"] for w in workers] == [2**31, 2**31, 2**30]
    assert [w.get("max_model_len") for w in workers] == [None, None, 99]
    assert [w.get("prefix_caching") for w in workers] == [False, False, None]
    for worker in workers:
        from_mapping(WorkerConfig, worker, "test")


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (MODELS, {"model": "org/other"}, "'models' and 'model' are both set"),
        (MODELS, {"workers": 4}, "'workers' is 4, but the models of .* have 3 workers"),
        ("models: []", {}, "a list of 1 to 64 models"),
        ("models: [org/small]", {}, "must be a mapping with 'model'"),
        ("models: [{name: a}]", {}, "'model' is missing in model 1"),
        ("models: [{model: a, memroy: 1GiB}]", {}, "did you mean 'memory'"),
        ("models: [{model: a, workers: 65}]", {}, "must be 1 to 64"),
        ("models: [{model: a}, {model: b}]", {"roles": "auto"}, "no model has two workers"),
        ("models: [{model: a}]", {"workers": 2}, "of .* have 1 worker; remove it"),
        ("models: [{model: a, worker: {save: x}}]", {}, "'save' in section 'worker' of model 1 of"),
        ("models: [{model: a, worker: {model_name: x}}]", {}, "cannot be set in section 'worker'"),
        ("modles: []", {}, "did you mean 'models'"),
    ],
)
def test_invalid_model_lists_are_refused(
    tmp_path: Path, text: str, flags: dict[str, Any], message: str
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_options(None, flags | {"models": path})
