"""`tideserve up`: starts a cluster on this machine, supervises it and drains it."""

import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

from services.common.address import is_loopback
from services.common.clock import monotonic_s
from services.common.errors import ConfigError
from services.common.open_files import raise_open_files_limit
from services.common.setting import settings_of
from services.common.size import format_size
from services.gateway.config import GatewayConfig, exposure_warning
from services.gateway.keys.key_file import read_keys
from services.gateway.model.settings import models_of
from services.worker.config import WorkerConfig
from tideserve.cli.cache import PROFILES, cache_root
from tideserve.cli.cluster import TICK_S, ClusterProcesses
from tideserve.cli.cluster_folder import (
    ClusterFolder,
    create_run_folder,
    default_folder,
    remove_run_folder,
)
from tideserve.cli.cluster_options import CONFIGS, ClusterOptions
from tideserve.cli.default import DEFAULT_URL
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, unusable
from tideserve.cli.etcd_binary import EtcdMissing, find_etcd
from tideserve.cli.etcd_process import (
    answers,
    check_given_etcd,
    claim_given_etcd,
    private_etcd,
    release_given_etcd,
)
from tideserve.cli.host import (
    check_port,
    hold_port,
    shortages,
    unused_variables,
    url_of,
)
from tideserve.cli.host_memory import describe_host_memory, host_memories, with_host_memory
from tideserve.cli.metrics_ports import MetricsPorts, targets_json
from tideserve.cli.model_folder import DUMMY, check_memory
from tideserve.cli.model_list import PlacedModel
from tideserve.cli.model_store import ModelUnavailable, resolve_model
from tideserve.cli.process import Program, child_environment, service_command
from tideserve.cli.report import Report
from tideserve.cli.service_config import Placement, service_configs, worker_names
from tideserve.cli.stop_signals import StopRequested, StopSignals
from tideserve.cli.upkeep import Upkeep
from tideserve.cli.upstream_model import model_folder, read_key, upstream_model
from tideserve.cli.vllm_install import chosen_python

if TYPE_CHECKING:
    from tideserve.cli.client import HttpClient

SERVICE_MODULES = {name: f"services.{name}" for name in CONFIGS}
# Services that drain: they finish running requests for as long as their configuration allows.
DRAINING = {"gateway": GatewayConfig, "worker": WorkerConfig}
STOP_GRACE_S = {"gateway": 5.0, "worker": 10.0, "scheduler": 5.0, "memmgr": 5.0}
ETCD_START_TIMEOUT_S = 30.0
ETCD_STARTS_MAX = 3
# Far from the HTTP port, because a second cluster is likely to use the next port.
ADMIN_PORT_OFFSET = 10_000
GRPC_PORT_OFFSET = 20_000
UPKEEP_S = 10.0
READY_POLL_S = 0.2
READY_PROBE_TIMEOUT_S = 1.0
WAITS_NO_MORE = {"expected_wait_s": 0}


@dataclass
class Up:
    """One run of `tideserve up`."""

    options: ClusterOptions
    signals: StopSignals
    modules: Mapping[str, str] = field(default_factory=lambda: SERVICE_MODULES)

    def __post_init__(self) -> None:
        self.report = Report()
        self.folder = ClusterFolder(self.options.cluster_dir or default_folder(self.options.port))
        self.secure = "http_tls_cert_file" in self.options.gateway
        self.url = url_of(self.options.host, self.options.port, self.secure)
        self.etcd_url = self.options.etcd or ""
        self.etcd = "given"
        self.run_dir: Path | None = None
        self.metrics_ports = MetricsPorts()
        self.admin_port: int | None = None
        self.grpc_port: int | None = None
        self.engine_python: Path | None = None
        self._upstream_name = ""
        self._held_ports: list[socket.socket] = []
        self._etcd_claim = 0  # lease, while this cluster starts with a given etcd
        self._gateway_config: dict[str, Any] = {}
        self.upkeep = Upkeep(self.folder, self.report)
        self.cluster = ClusterProcesses(self.signals, self.report, self._write_state)

    def run(self) -> None:
        """Run the cluster until a clean stop.

        Raises:
            CommandError: if the cluster cannot be started; no process is left running then.
        """
        left_behind = self.folder.claim()
        try:
            with self.signals.interrupting():
                self.engine_python = chosen_python(self.options)
                self._check_machine(left_behind)
                model_dir, models = self._resolve_models()
            try:
                self._start(model_dir, models)
            except OSError as error:
                raise CommandError(
                    f"cannot write the files of the cluster ({error}); free some disk space, or"
                    " choose another folder with --cluster-dir",
                    EXIT_UNUSABLE,
                ) from error
            if self._wait_until_ready():
                self._print_summary()
                private_etcd_url = None if self.options.etcd else self.etcd_url
                self.cluster.run_until_stop(lambda: self.upkeep.run(private_etcd_url), UPKEEP_S)
        except StopRequested:
            self.report.line("Stopped before any process was started.")
        finally:
            self._stop()

    def _check_machine(self, left_behind: Mapping[str, object] | None) -> None:
        if left_behind is not None:
            remove_run_folder(Path(str(left_behind.get("run_dir", ""))))
        self._check_keys()
        check_port(self.options.host, self.options.port, left_behind is not None)
        if self.options.etcd:
            with self.report.step(f"etcd at {self.options.etcd}"):
                check_given_etcd(self.options.etcd_access(self.options.etcd))
        self.options = with_host_memory(self.options)
        sizes = self._memory_bytes(), sum(host_memories(self.options))
        warnings = shortages(self.options.device, *sizes, self.folder.root)
        for sentence in [*unused_variables(os.environ), *warnings, *self._exposure()]:
            self.report.warn(sentence)
        raise_open_files_limit()
        self._choose_admin_port()
        self._choose_grpc_port()

    def _memory_bytes(self) -> int:
        """Memory of all workers."""
        return 0 if self.options.upstream else sum(self.options.memories)

    def _exposure(self) -> list[str]:
        """A warning if the network can use the gateway without a key."""
        gateway = self.options.gateway
        has_grpc = gateway.get("public_grpc_port", self.options.grpc_port) is not None
        protected = gateway.get("public_grpc_ca_file") is not None
        grpc_host = self._grpc_host if has_grpc and not protected else None
        warning = exposure_warning(self.options.host, grpc_host, self._needs_key)
        return [] if warning is None else [warning]

    def _check_keys(self) -> None:
        """Fail here rather than in the gateway's log."""
        if self.options.api_keys is not None:
            with unusable(ConfigError):
                read_keys(self.options.api_keys.expanduser())

    def _choose_admin_port(self) -> None:
        """Use the port of the section, else a free port: the same at each start if possible."""
        chosen = self.options.gateway.get("admin_port", "free")
        if chosen != "free":
            self.admin_port = chosen
            return
        self.admin_port = self._hold(self._admin_host, ADMIN_PORT_OFFSET, "operators")

    def _choose_grpc_port(self) -> None:
        """Use the port of an option or of the section, else a free port."""
        chosen = self.options.gateway.get("public_grpc_port", self.options.grpc_port)
        if chosen == 0:
            chosen = self._hold(self._grpc_host, GRPC_PORT_OFFSET, "gRPC")
        elif isinstance(chosen, int):
            check_port(self._grpc_host, chosen, wait_for_release=True)
        self.grpc_port = chosen

    def _hold(self, host: str, offset: int, purpose: str) -> int:
        """Reserve a port for the gateway: the HTTP port plus `offset`, else any free port."""
        wanted = self.options.port + offset
        held = hold_port(host, wanted if wanted < 2**16 else 0, purpose)
        self._held_ports.append(held)
        return int(held.getsockname()[1])

    @property
    def _grpc_host(self) -> str:
        return str(self.options.gateway.get("public_grpc_host", self.options.host))

    @property
    def grpc_target(self) -> str | None:
        """host:port of the gateway's gRPC from this machine; None if gRPC is off."""
        if self.grpc_port is None:
            return None
        return url_of(self._grpc_host, self.grpc_port, False).removeprefix("http://")

    @property
    def _admin_host(self) -> str:
        return str(self.options.gateway.get("admin_host", "127.0.0.1"))

    @property
    def admin_url(self) -> str | None:
        """URL of the admin port from this machine; None if the port is off."""
        if not self.admin_port:
            return None
        tls = self.secure and not is_loopback(self._admin_host)
        return url_of(self._admin_host, self.admin_port, tls)

    def _resolve_models(self) -> tuple[Path, tuple[PlacedModel, ...]]:
        """The folder of the model, and all models of the option `models`."""
        options = self.options
        if options.upstream:
            return self._resolve_upstream_model(), ()
        if not options.listed_models:
            return self._resolve_model(options.model, options.memory, options.dtype), ()
        placed = []
        for model in options.listed_models:
            memory, dtype = model.memory or options.memory, model.dtype or options.dtype
            folder = self._resolve_model(model.model, memory, dtype)
            placed.append(PlacedModel(model, model.name or name_of(model.model, folder), folder))
        with unusable(ConfigError):
            models_of([model.gateway_entry() for model in placed], {})
        return placed[0].dir, tuple(placed)

    def _resolve_model(self, model: str | None, memory_bytes: int, dtype: str) -> Path:
        load_format = self.options.load_format
        title = f"Model {model or '(default)'}"
        with self.report.step(title), unusable(ModelUnavailable):
            model_dir = resolve_model(model, cache_root(), self.report.line, load_format)
            if load_format != DUMMY:
                check_memory(model_dir, memory_bytes, dtype)
        return model_dir

    def _resolve_upstream_model(self) -> Path:
        options = self.options
        key = read_key(options.upstream_key_file)
        with self.report.step("Model of the upstream servers"), unusable(ModelUnavailable):
            model = upstream_model(options.upstream, key, options.upstream_model)
            self._upstream_name = model.name
            if model.everywhere:
                # A server that comes back with another model is not used with this tokenizer.
                self.options = replace(options, upstream_model=model.name)
            if options.model:
                return resolve_model(options.model, cache_root(), self.report.line, DUMMY)
            return model_folder(model, self.report.line)

    def _start(self, model_dir: Path, models: tuple[PlacedModel, ...]) -> None:
        self.folder.rotate_logs()
        self.run_dir = create_run_folder()
        if self.options.etcd:
            self._etcd_claim = claim_given_etcd(self.options.etcd_access(self.options.etcd))
        else:
            self._start_etcd()
        placement = Placement(
            model_dir=model_dir,
            model_name=self.options.model_name
            or self._upstream_name
            or name_of(self.options.model, model_dir),
            etcd_url=self.etcd_url,
            run_dir=self.run_dir,
            profile_dir=cache_root() / PROFILES,
            metrics_ports=self.metrics_ports.hold(
                ("gateway", "scheduler", "memmgr", *worker_names(self.options.workers))
            ),
            admin_port=self.admin_port,
            grpc_port=self.grpc_port,
            engine_python=self.engine_python,
            batch_dir=self.folder.batches,
            models=models,
        )
        self.model_names = [model.name for model in models] or [placement.model_name]
        configs = service_configs(self.options, placement)
        self.folder.write_targets(targets_json(configs))
        self._gateway_config = configs["gateway"]
        for name, config in configs.items():
            if self.signals.stopping:
                return
            kind = "worker" if name in worker_names(self.options.workers) else name
            path = self.folder.write_config(name, config)
            self.cluster.start(self._program(name, kind, path))

    def _start_etcd(self) -> None:
        with unusable(EtcdMissing):
            binary = find_etcd(cache_root())
        self.folder.clear_etcd_data()
        if binary.has_upstream_warning:
            self.report.warn(
                f"etcd {binary.version} can lose data in a crash; for production, install 3.5.3 or"
                " newer on PATH"
            )
        self.etcd = f"{binary.version} ({binary.source})"
        with self.folder.log_path("etcd").open("a") as log:
            log.write(f"etcd {self.etcd}: {binary.path}\n")
        with self.report.step(f"etcd {self.etcd}, private", lambda: self.signals.stopping):
            for _ in range(ETCD_STARTS_MAX):
                program, self.etcd_url = private_etcd(binary, self.folder)
                self.cluster.start(program)
                if self._etcd_answers():
                    return
                # Another process may have taken a port between the check and the start.
                self.folder.clear_etcd_data()
        raise CommandError(
            f"etcd does not start; see {self.folder.log_path('etcd')}, or pass the URL of a"
            " running etcd with --etcd"
        )

    def _etcd_answers(self) -> bool:
        """Wait for the private etcd or a stop request; False if etcd exited."""
        deadline_s = monotonic_s() + ETCD_START_TIMEOUT_S
        while not self.signals.stopping and not answers(self.etcd_url):
            self.cluster.tick()
            if "etcd" not in self.cluster.pids:
                return False
            if monotonic_s() > deadline_s:
                raise CommandError(
                    f"etcd did not start within {ETCD_START_TIMEOUT_S:.0f} s; see"
                    f" {self.folder.log_path('etcd')}"
                )
            time.sleep(TICK_S)
        return True

    def _program(self, name: str, kind: str, config: Path) -> Program:
        extra, drain_s = {}, 0.0
        if kind in DRAINING:
            drain_s = drain_time_s(DRAINING[kind], getattr(self.options, kind))
        if kind == "worker":
            assert self.run_dir is not None
            (self.run_dir / name).mkdir(mode=0o700)
            extra["OMP_NUM_THREADS"] = str(self.options.threads_per_worker)
        return Program(
            name=name,
            command=service_command(self.modules[kind], config),
            log_path=self.folder.log_path(name),
            folder=self.folder.root,
            environment=child_environment(extra),
            stop_grace_s=STOP_GRACE_S[kind] + drain_s,
        )

    def _wait_until_ready(self) -> bool:
        """Wait for /ready; False if a stop was requested first."""
        # Imported late, because it is slow: the services start in the meantime.
        from tideserve.cli.client import HttpClient

        deadline_s = monotonic_s() + self.options.ready_timeout_s
        workers = self.options.workers
        with (
            self.report.step(
                f"Services and {workers} worker{'s' if workers > 1 else ''}",
                lambda: self.signals.stopping,
            ),
            HttpClient(
                self.url, self.options.api_key, READY_PROBE_TIMEOUT_S, own_process=True
            ) as client,
        ):
            while not self.signals.stopping:
                self.cluster.tick()
                missing = self._readiness_gap(client)
                if missing is None:
                    self.cluster.mark_ready()
                    self._release_etcd()
                    # A restarted gateway joins a cluster that was complete, so it need not wait.
                    config = self._gateway_config | WAITS_NO_MORE
                    write = partial(self.folder.write_config, "gateway", config)
                    self.upkeep.write("config/gateway.yaml", write)
                    return True
                if monotonic_s() > deadline_s:
                    raise CommandError(
                        f"the cluster was not ready within {self.options.ready_timeout_s:.0f} s"
                        f" ({missing.sentences}); see the logs in {self.folder.logs}, or allow"
                        " more time with --ready-timeout"
                    )
                waited_s = self.options.ready_timeout_s - (deadline_s - monotonic_s())
                self.report.doing(
                    missing.line, f"{waited_s:.0f} s; up to {self.options.ready_timeout_s:.0f} s"
                )
                time.sleep(READY_POLL_S)
        return False

    def _readiness_gap(self, client: "HttpClient") -> "Missing | None":
        """What the gateway still waits for, of all models; None when the cluster is ready."""
        names = self.model_names if self.options.listed_models else [None]
        gaps = (readiness_gap(client, bool(self.options.upstream), name) for name in names)
        return next((gap for gap in gaps if gap is not None), None)

    @property
    def _needs_key(self) -> bool:
        options = self.options
        return bool(options.api_key or options.api_keys or "api_keys_file" in options.gateway)

    def _print_summary(self) -> None:
        key = " -H 'Authorization: Bearer '$TIDESERVE_API_KEY" if self._needs_key else ""
        body = (
            f'{{"model": "{self.model_names[0]}", "temperature": 0, "messages":'
            ' [{"role": "user", "content": "What is the capital of France?"}]}'
        )
        at = "" if self.url == DEFAULT_URL else f" --url {self.url}"
        command = command_name()
        # Commands for operators search the default folder, unless they have the chosen folder.
        folder = f" --cluster-dir {shlex.quote(str(self.folder.root))}"
        here = folder if self.options.cluster_dir else at
        self.report.box(
            "tideserve is ready",
            [
                ("URL", f"{self.url}/v1"),
                *([("gRPC", self.grpc_target)] if self.grpc_target else []),
                *(("Model", name) for name in self.model_names),
                *self._engine_rows(),
                *self._pace(),
                *([("Live page", self.admin_url)] if self.admin_url else []),
                ("Logs", str(self.folder.logs)),
                ("Metrics", f"{self.folder.targets} (for Prometheus)"),
                (
                    "Try",
                    f"curl {self.url}/v1/chat/completions{key}"
                    f" -H 'Content-Type: application/json' -d '{body}'",
                ),
                ("", f"{command} chat{at}   ·   {command} status{here}"),
                ("Stop", "Ctrl-C"),
            ],
        )

    def _engine_rows(self) -> list[tuple[str, str]]:
        options = self.options
        if options.upstream:
            return [("Upstreams", ", ".join(options.upstream))]
        memory = format_size(options.memory)
        if options.listed_models:
            counts = zip(self.model_names, options.listed_models, strict=True)
            workers = ", ".join(f"{model.workers} of {name}" for name, model in counts)
            rows = [("Workers", workers)]
        else:
            rows = [("Workers", f"{options.workers}, {memory} each, {options.dtype}")]
        if sizes := describe_host_memory(options):
            rows.append(("Host memory", f"{sizes}, for copies of KV"))
        return [*rows, *([("Engine", "vLLM: groups never merge")] if self.engine_python else [])]

    def _pace(self) -> list[tuple[str, str]]:
        paced = self.options.paced
        if paced is None:
            return []
        return [("PACED", f"iterations are padded to the times of {paced}; not this machine's own")]

    def _release_etcd(self) -> None:
        if self._etcd_claim:
            release_given_etcd(self.options.etcd_access(self.etcd_url), self._etcd_claim)
            self._etcd_claim = 0

    def _stop(self) -> None:
        if self.cluster.pids:
            self.report.line(
                f"Stopping ({self.signals.reason}): running requests may finish;"
                " press Ctrl-C again to stop at once."
                if self.signals.stopping
                else "Stopping all processes."
            )
        workers = worker_names(self.options.workers)
        self.cluster.stop([["gateway"], workers, ["scheduler"], ["memmgr"], ["etcd"]])
        self.upkeep.close()
        self._release_etcd()
        if self.run_dir is not None:
            remove_run_folder(self.run_dir)
        self.metrics_ports.release()
        self.folder.release()
        for held in self._held_ports:
            held.close()
        if self.signals.stopping:
            self.report.line("Stopped.")
        self.report.close()

    def _write_state(self) -> None:
        self.upkeep.write("cluster.json", lambda: self.folder.write_state(self._state()))

    def _state(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "admin_url": self.admin_url,
            "grpc_target": self.grpc_target,
            "etcd_url": self.etcd_url,
            "etcd": self.etcd,
            "pid": os.getpid(),
            "programs": self.cluster.programs,
            "pids": self.cluster.pids,
            "logs": str(self.folder.logs),
            "run_dir": str(self.run_dir) if self.run_dir else None,
        }


def drain_time_s(config: type[Any], section: Mapping[str, Any]) -> float:
    """Seconds that a service may drain: from its section, else from its own defaults."""
    defaults = {key: setting.default for key, setting in settings_of(config).items()}
    total_s = 0.0
    for name in defaults.keys() & {"drain_delay_s", "drain_timeout_s"}:
        chosen = section.get(name, defaults[name])
        # The service itself rejects values that are no numbers.
        total_s += float(chosen if isinstance(chosen, int | float) else defaults[name])
    return total_s


def name_of(argument: str | None, model_dir: Path) -> str:
    """Name of the model in requests: the hub id without revision, or the name of the folder."""
    if argument and not Path(argument).expanduser().is_dir():
        return argument.partition("@")[0]
    return model_dir.resolve().name


def command_name() -> str:
    """The shell command that runs tideserve from the current folder."""
    if shutil.which("tideserve"):
        return "tideserve"
    beside = Path(sys.executable).with_name("tideserve")
    if not beside.exists():
        return f"{sys.executable} -m tideserve.cli.commands.main"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


class Missing(NamedTuple):
    """Reasons why a cluster is not ready: complete, and shortened to a progress line."""

    sentences: str
    line: str


def readiness_gap(client: "HttpClient", in_front: bool, model: str | None = None) -> Missing | None:
    """What the gateway still waits for; None when the cluster is ready.

    `in_front`: the workers are in front of upstream servers. `model`: of several.
    """
    query = "" if model is None else "?" + urlencode({"model": model})
    response = client.probe(f"/ready{query}")
    if response is None:
        return Missing("the gateway does not answer", "the gateway is starting")
    if response.is_success:
        return None
    try:
        return missing_of(response.json(), in_front, model)
    except (ValueError, KeyError, TypeError):
        sentence = f"the gateway answers {response.status_code}"
        return Missing(sentence, sentence)


def missing_of(
    ready: Mapping[str, Any], in_front: bool = False, model: str | None = None
) -> Missing:
    """Parse the JSON body of /ready, for `model` of several. Raises KeyError, TypeError."""
    of_model = f"{model}: " if model else ""
    sentences = of_model + "; ".join(map(str, ready["missing"]))
    expected, there = ready.get("workers_expected"), ready.get("workers_registered", 0)
    if expected is None or there >= expected:
        return Missing(sentences, sentences)
    doing = "workers are loading the model (the first start with a dtype compiles kernels)"
    if in_front:
        doing = "workers are waiting for the upstream servers"
    return Missing(sentences, f"{of_model}{doing}: {there} of {expected} ready")
