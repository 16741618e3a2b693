"""The network policies of deploy/ permit the lanes of two workers, including data.

Two network namespaces represent two pods, and packet filters with the policies' ports represent the
network plugin. Needs root, iproute2, iptables and kustomize.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_config import environment_of, read_config
from deploy_network import selects
from deploy_objects import CPU_OVERLAY, ToolMissing, build, identity

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {"a": "10.213.77.1", "b": "10.213.77.2"}
TIMEOUT_S = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def objects():
    try:
        return {identity(manifest): manifest for manifest in build(CPU_OVERLAY)}
    except ToolMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def pods(objects) -> Iterator[dict[str, str]]:
    """Names of two network namespaces that enforce the policies."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "iptables"))):
        pytest.skip("network namespaces need root, iproute2 and iptables")
    tag = uuid.uuid4().hex[:6]
    names = {role: f"tide-{tag}-{role}" for role in ADDRESSES}
    made = subprocess.run(["ip", "netns", "add", names["a"]], check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip("this machine makes no network namespaces")
    try:
        run("ip", "netns", "add", names["b"])
        run("ip", "link", "add", f"v{tag}a", "type", "veth", "peer", "name", f"v{tag}b")
        for role, name in names.items():
            device = f"v{tag}{role}"
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{ADDRESSES[role]}/24", "dev", device)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", device, "up")
            close(name, worker_ports(objects))
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


def worker_ports(objects) -> list[str]:
    """Port ranges at which the policies permit traffic between workers."""
    return [
        f"{port['port']}:{port.get('endPort', port['port'])}"
        for policy in objects.values()
        if policy["kind"] == "NetworkPolicy" and selects(policy["spec"]["podSelector"], "worker")
        for rule in policy["spec"].get("ingress", ())
        if any(selects(peer.get("podSelector", {}), "worker") for peer in rule.get("from", ()))
        for port in rule["ports"]
    ]


def close(name: str, ports: list[str]) -> None:
    inside = ("ip", "netns", "exec", name, "iptables")
    run(*inside, "-P", "INPUT", "DROP")
    run(*inside, "-A", "INPUT", "-i", "lo", "-j", "ACCEPT")
    known = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED")
    run(*inside, "-A", "INPUT", *known, "-j", "ACCEPT")
    for port in ports:
        run(*inside, "-A", "INPUT", "-p", "tcp", "--dport", port, "-j", "ACCEPT")


def exchange(pods: dict[str, str], settings: dict[str, object]) -> int:
    """Exit status of the connecting node; 0 if every frame was echoed."""
    nodes = {}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    try:
        for role, other in (("b", "a"), ("a", "b")):
            command = ["ip", "netns", "exec", pods[role], sys.executable, "-m"]
            command += ["tests.support.lane_node", role, ADDRESSES[role], ADDRESSES[other]]
            nodes[role] = subprocess.Popen(
                [*command, json.dumps(settings)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            if nodes[role].stdout.readline() != "listening\n":
                pytest.skip("UCX cannot be loaded on this machine")
        return nodes["a"].wait(TIMEOUT_S)
    finally:
        for node in nodes.values():
            node.kill()
            node.communicate()


@pytest.fixture
def settings(objects):
    container = objects["Deployment/tideserve-worker"]["spec"]["template"]["spec"]["containers"][0]
    config = read_config("worker", environment_of(container, objects))
    names = ("activation_port", "bulk_port", "ucx_ports")
    return {name: getattr(config, name) for name in names}


def test_lanes_pass_with_the_settings_of_the_manifests(pods, settings):
    assert exchange(pods, settings) == 0


def test_lanes_do_not_pass_if_ucx_listens_at_other_ports(pods, settings):
    assert exchange(pods, settings | {"ucx_ports": "50095-50126"}) == 1
