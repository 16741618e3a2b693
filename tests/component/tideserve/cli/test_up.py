"""`tideserve up` with fake services: clean-up, restarts and messages."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cluster import REPOSITORY, Cluster
from tests.support.exhausted import no_room_for_files
from tests.support.ports import free_port
from tests.support.refusing_address import refusing_address

FAKE_UP = (sys.executable, "-m", "tests.support.fake_up")
# A parent process under the test's control: it runs the rest of its command line with the given
# handling of SIGINT, and with SIGHUP as in a terminal, even if the tests run under nohup.
START_WITH = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.{how});"
    " signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)

pytestmark = pytest.mark.cluster


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def make(model_dir: Path) -> Iterator[Any]:
    """A factory of clusters that are not started; remaining processes are an error."""
    made: list[Cluster] = []

    def build(**options: Any) -> Cluster:
        options = {"command": FAKE_UP, "model_dir": model_dir, "load_format": "dummy"} | options
        made.append(Cluster(**options))
        return made[-1]

    yield build
    left = {}
    for cluster in made:
        left |= cluster.wait_until_gone()
        cluster.kill_all()
        shutil.rmtree(cluster.folder, ignore_errors=True)
    assert not left


def run_folder(cluster: Cluster) -> Path:
    state = json.loads((cluster.folder / "cluster" / "cluster.json").read_text())
    return Path(state["run_dir"])


def test_a_cluster_starts_reports_and_stops(make: Any) -> None:
    with make(worker={"fake_child": True}) as cluster:
        assert cluster.url in cluster.output()
        assert f"Live page  {cluster.admin_url}" in cluster.output()
        pids = cluster.pids()
        assert list(pids) == ["etcd", "memmgr", "scheduler", "gateway", "worker-0", "worker-1"]
        sessions = {os.getsid(pid) for pid in pids.values()}
        assert sessions == set(pids.values()), "a terminal's signal must not reach the services"
        config = cluster.folder / "cluster" / "config" / "gateway.yaml"
        assert config.stat().st_mode & 0o777 == 0o600
        assert yaml.safe_load(config.read_text())["expected_wait_s"] == 0, "one that is restarted"
        sockets = run_folder(cluster)
        assert sockets.stat().st_mode & 0o777 == 0o700
        assert cluster.stop() == 0
        assert "Stopped" in cluster.output()
    assert not sockets.exists()


def test_no_process_outlives_a_killed_command_and_the_next_starts(make: Any) -> None:
    first = make()
    with first:
        sockets = run_folder(first)
        os.kill(first.up_pid, signal.SIGKILL)
        assert not first.wait_until_gone()
        first.start()
        first.wait_until_ready()
        assert not sockets.exists()


def test_a_dead_process_is_restarted_and_its_children_are_killed(make: Any) -> None:
    with make(workers=1, worker={"fake_child": True}) as cluster:
        old_pid = cluster.kill("worker-0")
        cluster.wait_for_restart("worker-0", old_pid)
        assert "worker-0 died (signal SIGKILL)" in cluster.output()
        log = cluster.folder / "cluster" / "logs" / "worker-0.log"
        assert "worker-0 died (signal SIGKILL)" in log.read_text()
        own = [line for line in cluster.processes().values() if "sleep(600)" in line]
        assert len(own) <= 1
        old_url, old_pid = cluster.etcd_url, cluster.kill("etcd")
        cluster.wait_for_restart("etcd", old_pid)
        assert cluster.etcd_url == old_url


def test_a_cluster_survives_a_full_disk(make: Any) -> None:
    with make(workers=1) as cluster:
        state = cluster.folder / "cluster" / "cluster.json"
        before = state.read_text()
        # Too small for the state, large enough for the logs of the fake services.
        with no_room_for_files(len(before) // 2, cluster.up_pid):
            old_pid = cluster.kill("worker-0")
            cluster.eventually(lambda: worker_pids(cluster) not in ([], [old_pid]))
            assert state.read_text() == before
            assert cluster.running
        cluster.wait_for_restart("worker-0", old_pid)
        # The output of `up` is also a file, so its lines may be lost meanwhile.
        assert "can be written again" in cluster.output()


def worker_pids(cluster: Cluster) -> list[int]:
    return [pid for pid, line in cluster.processes().items() if "config/worker-0.yaml" in line]


def test_a_cluster_stops_while_the_disk_is_full(make: Any) -> None:
    with make(workers=1) as cluster, no_room_for_files(0, cluster.up_pid):
        assert cluster.stop() == 0
        assert not cluster.wait_until_gone()


def test_a_full_disk_at_the_start_is_reported_in_one_sentence(model_dir: Path) -> None:
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        " os.execv(sys.argv[1], sys.argv[1:])"
    )
    folder = model_dir.with_name("cluster")
    options = ["--model", str(model_dir), "--load-format", "dummy", "--port", str(free_port())]
    up = [*FAKE_UP, "up", *options, "--cluster-dir", str(folder)]
    done = run([sys.executable, "-c", limited, *up])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot write the files of the cluster" in line


def test_a_process_that_ignores_signals_is_killed_at_the_second_request(make: Any) -> None:
    # Without the second signal it would have ten minutes to stop.
    with make(workers=1, gateway={"fake_deaf": True, "drain_timeout_s": 600}) as cluster:
        os.kill(cluster.up_pid, signal.SIGINT)
        cluster.eventually(lambda: "Stopping" in cluster.output())
        assert cluster.stop(signal.SIGINT) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_even_if_interrupts_were_ignored(make: Any, number: signal.Signals) -> None:
    ignoring = (sys.executable, "-c", START_WITH.format(how="SIG_IGN"), *FAKE_UP)
    with make(workers=1, command=ignoring) as cluster:
        assert cluster.stop(number) == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("number", "shell"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, ""),
        (signal.SIGKILL, ""),
        (signal.SIGINT, ": through a shell; "),
        (signal.SIGKILL, ": through a shell; "),
    ],
)
def test_the_cluster_stops_with_make(
    make: Any, tmp_path: Path, number: signal.Signals, shell: str
) -> None:
    makefile = tmp_path / "Makefile"
    makefile.write_text(f"up:\n\t@{shell}{' '.join(FAKE_UP)} $(ARGS)\n")
    through = (
        *(sys.executable, "-c", START_WITH.format(how="SIG_DFL")),
        *("sh", "-c", f'exec make -f {makefile} ARGS="$*"', "sh"),
    )
    cluster = make(workers=1, command=through)
    with cluster:
        os.kill(cluster.up_pid, number)
        assert not cluster.wait_until_gone()
        assert "Stopped" in cluster.output() or number == signal.SIGTERM


def test_an_unusable_configuration_ends_with_the_services_message(make: Any) -> None:
    sentence = "tideserve-worker: the memory budget is too small; it needs 3 MiB"
    worker = {"fake_exit": 2, "fake_sentence": sentence}
    cluster = make(worker=worker, gateway={"fake_unready": True})
    cluster.start()
    assert cluster.wait() == 2
    assert sentence in cluster.output()


def test_a_service_that_keeps_dying_ends_the_command(make: Any) -> None:
    scheduler = {"fake_exit": 1, "fake_sentence": "boom"}
    cluster = make(workers=1, scheduler=scheduler, gateway={"fake_unready": True})
    cluster.start()
    assert cluster.wait() == 1
    assert "scheduler keeps dying: boom" in cluster.output()


def test_a_cluster_that_never_becomes_ready_names_what_is_missing(make: Any) -> None:
    cluster = make(workers=1, ready_timeout=20, gateway={"fake_unready": True})
    cluster.start()
    assert cluster.wait() == 1
    assert "not ready within 20 s (the tide)" in cluster.output()


def test_a_port_in_use_is_reported_before_any_start(make: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster = make(port=server.getsockname()[1])
        cluster.start()
        assert cluster.wait() == 2
    assert "choose another port with --port" in cluster.output()
    assert not (cluster.folder / "cluster" / "logs" / "etcd.log").exists()


def test_a_second_cluster_in_the_same_folder_is_refused(make: Any) -> None:
    with make(workers=1) as cluster:
        command = [*FAKE_UP, "up", "--cluster-dir", str(cluster.folder / "cluster")]
        done = run(command)
        assert done.returncode == 2
        assert f"process {cluster.up_pid}" in done.stderr
        assert cluster.pids()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"etcd": "http://{address}"}, "cannot be reached"),
        ({"etcd": "nonsense"}, "is not an etcd URL"),
        ({"model": "no/such folder"}, "neither a folder nor"),
        ({"memroy": "1GiB"}, "did you mean 'memory'?"),
        ({"memory": "much"}, "'much' is not a size"),
        ({"workers": 0}, "must be 1 to 64"),
        ({"device": "gpu"}, "must be cpu, cuda or cuda:N"),
        ({"chunk_size": 5000}, "must be a multiple of the page size"),
        ({"worker": {"etcd_url": "x"}}, "cannot be set in section 'worker'"),
        ({"host": "no.such.host.invalid"}, "cannot be resolved"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(
    make: Any, options: dict[str, Any], message: str
) -> None:
    with refusing_address() as address:
        if "etcd" in options:
            options = {"etcd": options["etcd"].format(address=address)}
        cluster = make(**options)
        cluster.start()
        assert cluster.wait(60) == 2
    assert message in cluster.output()
    assert "Traceback" not in cluster.output()


def test_chat_status_and_logs_reach_the_cluster(make: Any) -> None:
    with make(workers=1, api_key="secret") as cluster:
        key = {"TIDESERVE_API_KEY": "secret"}
        ask = [sys.executable, "-m", "tideserve.cli.commands.main", "chat", "--url", cluster.url]
        assert run([*ask, "hello you"], key).stdout == "hello you \n"
        assert run(ask, key, stdin="from a pipe").stdout == "from a pipe \n"
        for prompt, message in (
            ("fail", "the worker was lost"),
            ("break", "closed the stream early"),
        ):
            done = run([*ask, prompt], key)
            assert (done.returncode, message in done.stderr) == (1, True)
        assert "API key" in run([*ask, "hello"]).stderr
        assert "there is no model x" in run([*ask, "--model", "x", "hello"], key).stderr

        status = [sys.executable, "-m", "tideserve.cli.commands.main", "status", "--cluster-dir"]
        status.append(str(cluster.folder / "cluster"))
        assert f"status --cluster-dir {status[-1]}" in cluster.output()
        assert json.loads(run([*status, "--json"]).stdout) == cluster.status()
        assert "gateway" in run(status).stdout

        logs = [sys.executable, "-m", "tideserve.cli.commands.main", "logs", "--cluster-dir"]
        logs.append(str(cluster.folder / "cluster"))
        assert "worker-0  | 2026-01-01T00:00:00 info    alive" in run(logs).stdout
        assert json.loads(run([*logs, "gateway", "--raw"]).stdout)["message"] == "alive"
        assert "choose from etcd, gateway" in run([*logs, "unknown"]).stderr


def run(
    command: list[str], environment: dict[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
