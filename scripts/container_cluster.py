"""A cluster of containers for a test: started, disturbed and removed by `docker compose`."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
FILES = ("compose.yaml", "docker/compose.test.yaml")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
WHEELS = Path("/opt/wheels")
STATUS_URL = "http://127.0.0.1:8001/tideserve/v1/status"
SERVICES = ("etcd", "scheduler", "memmgr", "gateway", "worker")
COMMAND_TIMEOUT_S = 60.0
BUILD_TIMEOUT_S = 900.0
UP_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 240.0
POLL_S = 0.2
LOG_LINES = 15

T = TypeVar("T")


class CommandFailed(Exception):
    """A command of the engine failed; the message has its last output."""


def run(
    command: Sequence[str],
    timeout_s: float = COMMAND_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command; returns its output. Raises CommandFailed on errors and on timeout."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{' '.join(command)} took more than {timeout_s:.0f} s") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LOG_LINES:])
        raise CommandFailed(f"{' '.join(command)} ended with {done.returncode}: {last}")
    return done.stdout


def eventually(check: Callable[[], T | None], deadline_s: float = 60.0) -> T:
    """Call `check` until it returns a true value, which is returned. Raises AssertionError."""
    end_s = time.monotonic() + deadline_s
    value: T | Exception | None = None
    while time.monotonic() < end_s:
        try:
            if value := check():
                return value
        except (OSError, CommandFailed) as error:
            value = error
        time.sleep(POLL_S)
    raise AssertionError(f"still {value!r} after {deadline_s:.0f} s")


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports on which no process listens."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        try:
            for port in range(first, first + count):
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first
    raise AssertionError(f"no {count} consecutive free ports were found")


def free_subnet() -> str:
    """A private network of 256 addresses to which this machine has no route."""
    lines = Path("/proc/net/route").read_text().splitlines()[1:]
    taken = {socket.inet_ntoa(int(line.split()[1], 16).to_bytes(4, "little")) for line in lines}
    return next(net for n in range(256) if (net := f"10.213.{n}.0") not in taken) + "/24"


class Containers:
    """A compose project of its own. `settings` are the variables of the compose files."""

    def __init__(self, **settings: str) -> None:
        self.project = f"tideserve-test-{os.getpid()}"
        self.files: tuple[str, ...] = FILES
        self.undisturbed: dict[int, list[int]] = {}
        """Undisturbed outputs of the flood's requests by number, once they have run."""
        # Two gateways, each with a port for HTTP and a port for gRPC.
        self.port = free_ports(4)
        self.grpc_port = self.port + 2
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings = {
            "PORT": str(self.port),
            "GRPC_PORT": str(self.grpc_port),
            "TEST_SUBNET": free_subnet(),
            "TAG": "test",
            **({"CA_FILE": str(CERTIFICATES)} if CERTIFICATES.is_file() else {}),
            **({"WHEELS": str(WHEELS)} if any(WHEELS.glob("torch-*.whl")) else {}),
            **settings,
        }

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run `docker compose`. Raises CommandFailed."""
        files = [word for name in self.files for word in ("--file", name)]
        command = ["docker", "compose", "--project-name", self.project, *files, *arguments]
        return run(command, timeout_s, self.settings)

    def build(self) -> None:
        """Build all images."""
        self.compose("build", "--quiet", timeout_s=BUILD_TIMEOUT_S)

    def up(self, *arguments: str) -> None:
        """Start stopped services, and wait until they are healthy."""
        waiting = ("--wait", "--wait-timeout", str(int(UP_TIMEOUT_S)))
        try:
            self.compose("up", "--detach", *waiting, *arguments, timeout_s=UP_TIMEOUT_S + 60)
        except CommandFailed as error:
            raise CommandFailed(f"{error}\n{self.tail()}") from error

    def stop(self) -> None:
        """Stop all containers in order, but keep them for inspection."""
        self.compose("stop", timeout_s=STOP_TIMEOUT_S)

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        self.compose("down", "--volumes", "--timeout", "10", timeout_s=STOP_TIMEOUT_S)

    def tail(self) -> str:
        """The last lines of every unhealthy container."""
        tails = []
        for row in self.rows():
            ended = row["State"] == "exited" and row["ExitCode"] == 0
            if row["Health"] != "healthy" and not ended:
                lines = self.compose("logs", "--tail", str(LOG_LINES), row["Service"])
                tails.append(f"{row['Name']} is {row['Status']}\n{lines}")
        return "\n".join(tails)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `docker compose ps`, including exited containers."""
        text = self.compose("ps", "--all", "--format", "json")
        return [json.loads(line) for line in text.splitlines()]

    def names(self, service: str) -> list[str]:
        """The running containers of a service, in order."""
        rows = [row for row in self.rows() if row["State"] == "running"]
        return sorted(row["Name"] for row in rows if row["Service"] == service)

    def is_healthy(self, name: str) -> bool:
        """Whether a container's health check passes."""
        return (
            run(["docker", "inspect", "-f", "{{.State.Health.Status}}", name]).strip() == "healthy"
        )

    def images(self) -> dict[str, int]:
        """The size in bytes of each image."""
        names = self.compose("config", "--images").split()
        shown = run(["docker", "image", "inspect", "-f", "{{.Size}}", *names]).split()
        return {name: int(size) for name, size in zip(names, shown, strict=True)}

    def kill(self, name: str) -> None:
        """Kill a container, and start it again after two seconds."""
        run(["docker", "kill", name])
        time.sleep(2.0)
        run(["docker", "start", name])

    def restart(self, name: str) -> None:
        """Stop a container within its grace period, and start it again."""
        run(["docker", "restart", name], STOP_TIMEOUT_S)

    def pause(self, name: str, seconds: float = 5.0) -> None:
        """Freeze a container for a while."""
        run(["docker", "pause", name])
        time.sleep(seconds)
        run(["docker", "unpause", name])

    def disconnect(self, name: str, seconds: float = 5.0) -> None:
        """Disconnect a container from the services' network for a while."""
        network = f"{self.project}_inside"
        held = json.loads(
            run(["docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", name])
        )
        service = name.removeprefix(f"{self.project}-").rpartition("-")[0]
        address = ["--ip", held[network]["IPAddress"], "--alias", service]
        run(["docker", "network", "disconnect", network, name])
        time.sleep(seconds)
        run(["docker", "network", "connect", *address, network, name])

    def events(self, service: str, kind: str) -> dict[str, list[list[Any]]]:
        """Events of a type by container of a service: lines of kind, type and value."""
        logs = {}
        # `sed` is quiet about a type that does not occur, unlike `grep`.
        select = f"sed -n '/^\\[[^,]*, *\"{kind}\"/p' /tmp/events/*.jsonl"
        for name in self.names(service):
            text = run(["docker", "exec", name, "sh", "-c", select])
            logs[name] = [json.loads(line) for line in text.splitlines()]
        return logs

    def status(self) -> dict[str, Any]:
        """The status at the gateway's admin port, which answers only inside its container."""
        read = (
            f"import urllib.request; print(urllib.request.urlopen({STATUS_URL!r}).read().decode())"
        )
        text = run(["docker", "exec", self.names("gateway")[0], "python3", "-c", read])
        status: dict[str, Any] = json.loads(text)
        return status


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True, file=sys.stderr)
