"""Check that manifests and compose files configure the services correctly.

Each container's environment is read by the service's own loader, so an unknown variable or an
invalid value is detected here instead of at the start of a pod.
"""

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deploy_network import (
    Connection,
    admits_strangers,
    calls,
    check_connections,
    sources_of_services,
)
from deploy_objects import ROOT, Object, identity

from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig
from services.common.setting import settings_of
from services.common.settings import PREFIX, load_settings, variable
from services.common.size import parse_size_bytes
from services.worker.config import WorkerConfig
from tideserve.cli.cluster_options import CONFIGS

# Configuration key of a container's port, by port name.
PORT_KEYS = {
    "gateway": {
        "http": "port",
        "public-grpc": "public_grpc_port",
        "grpc": "grpc_port",
        "metrics": "metrics_port",
    },
    "scheduler": {"grpc": "port", "metrics": "metrics_port"},
    "memmgr": {"grpc": "port", "metrics": "metrics_port"},
    "worker": {
        "grpc": "port",
        "metrics": "metrics_port",
        "activations": "activation_port",
        "bulk": "bulk_port",
    },
}
GRACE_MARGIN_S = 15
# Placeholder for the value of a Secret.
SECRET = "a secret that is long enough"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
# Compose replaces ${NAME}, ${NAME:-default} and ${NAME-default}; here the environment is empty.
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}")


def read_config(service: str, environment: Mapping[str, str]) -> ServiceConfig:
    """The configuration of `service` in `environment`; secret files need not exist.

    Raises:
        ConfigError: under the same conditions as in the service.
    """
    cls = CONFIGS[service]
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write(SECRET)
        secret.flush()
        files = {
            variable(f"{key}_file"): secret.name
            for key, setting in settings_of(cls).items()
            if setting.secret
        }
        given = {name: files.get(name, value) for name, value in environment.items()}
        return load_settings(cls, None, given).config


def compose_services(text: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Each of our services in a parsed compose file, with its environment.

    A service that extends one of them has its name.
    """
    for own_name, service in text.get("services", {}).items():
        name = service.get("extends", {}).get("service", own_name)
        environment = service.get("environment") if name in CONFIGS else None
        if environment is None:
            continue
        if isinstance(environment, list):
            environment = dict(row.partition("=")[::2] for row in environment)
        yield (
            name,
            {
                key: VARIABLE.sub(lambda match: match["default"] or "", str(value))
                for key, value in environment.items()
                if value is not None
            },
        )


def check_objects(objects: Iterable[Object], version: str) -> list[str]:
    """A sentence per problem of the Deployments in `objects`; `version` is the image tag."""
    known = {identity(obj): obj for obj in objects}
    problems = [*_selectors(known)]
    configs = {}
    for service in CONFIGS:
        # Workers of different roles, or in front of several upstream servers, have a Deployment
        # each.
        first = f"Deployment/tideserve-{service}"
        names = [name for name in known if name == first or name.startswith(f"{first}-")]
        if not names:
            problems.append(f"there is no Deployment tideserve-{service}")
        for name in names:
            deployment = known[name]
            pod = deployment["spec"]["template"]["spec"]
            container = next(
                candidate for candidate in pod["containers"] if candidate["name"] == service
            )
            label = service if name == first else deployment["metadata"]["name"]
            try:
                config = read_config(service, environment_of(container, known))
            except ConfigError as error:
                problems.append(f"{label}: {error}")
                continue
            configs[service] = config
            own = _deployment(service, pod, container, config, version)
            problems += [f"{label}: {problem}" for problem in own]
    # The policies depend on the ports of all services.
    if configs.keys() == CONFIGS.keys():
        problems += _network(configs, known)
    return [*problems, *_services(known)]


def _deployment(
    service: str, pod: Object, container: Object, config: ServiceConfig, version: str
) -> Iterator[str]:
    yield from _images(pod, version)
    yield from _ports(service, container, config)
    yield from _files(container)
    yield from _probes(service, container)
    yield from _grace(service, pod, container, config)
    if service == "worker":
        yield from _memory(container, config)


def _selectors(known: Mapping[str, Object]) -> Iterator[str]:
    """Each Deployment selects its own pods and no others."""
    deployments = {name: obj["spec"] for name, obj in known.items() if obj["kind"] == "Deployment"}
    for name, spec in deployments.items():
        selector = spec["selector"]["matchLabels"].items()
        selected = [
            other
            for other, others in deployments.items()
            if selector <= others["template"]["metadata"]["labels"].items()
        ]
        if selected != [name]:
            yield f"{name} selects the pods of {', '.join(selected) or 'no Deployment'}"


def environment_of(container: Object, known: Mapping[str, Object]) -> dict[str, str]:
    """The environment that Kubernetes would set, with `SECRET` for values of Secrets.

    A field of the pod is represented by its path.

    Raises:
        ConfigError: if a ConfigMap or key does not exist.
    """

    def data(name: str) -> Mapping[str, str]:
        if f"ConfigMap/{name}" not in known:
            raise ConfigError(f"there is no ConfigMap {name}")
        values: Mapping[str, str] = known[f"ConfigMap/{name}"].get("data", {})
        return values

    environment: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        environment |= data(source["configMapRef"]["name"])
    for row in container.get("env", ()):
        source = row.get("valueFrom", {})
        reference = source.get("configMapKeyRef")
        if "fieldRef" in source:
            environment[row["name"]] = source["fieldRef"]["fieldPath"]
        elif reference is None:
            # Secrets are not in the tree, so use a placeholder.
            environment[row["name"]] = SECRET if "secretKeyRef" in source else row["value"]
        elif reference["key"] in data(reference["name"]):
            environment[row["name"]] = data(reference["name"])[reference["key"]]
        else:
            raise ConfigError(f"the ConfigMap {reference['name']} has no key {reference['key']}")
    return {name: value for name, value in environment.items() if name.startswith(PREFIX)}


def _images(pod: Object, version: str) -> Iterator[str]:
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        tag = container["image"].rpartition(":")[2]
        if tag.partition("-")[0] != version:
            yield f"image {container['image']} is not of version {version}"


def _ports(service: str, container: Object, config: ServiceConfig) -> Iterator[str]:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name, key in PORT_KEYS[service].items():
        if ports.get(name) != getattr(config, key):
            yield f"port {name} is {ports.get(name)}, but '{key}' is {getattr(config, key)}"
    for name in ports.keys() - PORT_KEYS[service].keys():
        yield f"port {name} does not belong to this service"


def _files(container: Object) -> Iterator[str]:
    """Files named by settings are in mounts, and these mounts follow updates of their source."""
    mounts = container["volumeMounts"]
    for row in container["env"]:
        path = row.get("value", "")
        if not row["name"].endswith("_FILE"):
            continue
        mount = next(
            (candidate for candidate in mounts if path.startswith(f"{candidate['mountPath']}/")),
            None,
        )
        if mount is None:
            yield f"{row['name']} is {path}, which is in no mount"
        elif "subPath" in mount:
            yield f"{row['name']} is in a mount with a subPath, which Kubernetes never updates"


def _probes(service: str, container: Object) -> Iterator[str]:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    served = (ROOT / "services" / service / "app.py").read_text()
    for name in PROBES:
        probe = container[name]
        health = ""
        if "grpc" in probe:
            port, health = probe["grpc"]["port"], probe["grpc"].get("service", "")
        elif "httpGet" in probe:
            port = ports.get(probe["httpGet"]["port"])
            if probe["httpGet"]["path"] not in ("/live", "/ready"):
                yield f"{name} asks {probe['httpGet']['path']}"
        else:
            address, _, health = probe["exec"]["command"][-1].partition("//")[2].partition("/")
            port = int(address.rpartition(":")[2])
        if port not in ports.values():
            yield f"{name} uses port {port}, which the container does not have"
        if health and f'"{health}"' not in served:
            yield f"{name} checks '{health}', which the service does not serve"
        if name == "readinessProbe" and "httpGet" not in probe and not health:
            yield "readinessProbe checks liveness instead of readiness"


def _grace(service: str, pod: Object, container: Object, config: ServiceConfig) -> Iterator[str]:
    hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain_s = getattr(config, "drain_delay_s", 0) + getattr(config, "drain_timeout_s", 0)
    least = hook + drain_s + GRACE_MARGIN_S
    if pod["terminationGracePeriodSeconds"] < least:
        yield f"terminationGracePeriodSeconds is shorter than the {least:g} s of sleep and drain"


def _network(configs: Mapping[str, Any], known: Mapping[str, Object]) -> Iterator[str]:
    """Policies allow every connection between services, and external access only for clients."""
    policies = [obj for obj in known.values() if obj["kind"] == "NetworkPolicy"]
    ports = {name: getattr(config, PORT_KEYS[name]["grpc"]) for name, config in configs.items()}
    connections = [
        Connection(source, target, ports[target], ports[target])
        for source, target in sorted(calls(sources_of_services()))
    ]
    worker = configs["worker"]
    first, _, last = worker.ucx_ports.partition("-")
    for low, high in (
        (worker.activation_port, worker.activation_port),
        (worker.bulk_port, worker.bulk_port),
        (int(first), int(last)),
    ):
        connections.append(Connection("worker", "worker", low, high))
    yield from check_connections(connections, policies)
    for name, port in ports.items():
        if admits_strangers(policies, name, port):
            yield f"a NetworkPolicy allows external access to port {port} of {name}"
    if not admits_strangers(policies, "gateway", configs["gateway"].port):
        yield "no NetworkPolicy allows clients"


def _memory(container: Object, config: ServiceConfig) -> Iterator[str]:
    """The memory limit exceeds `memory_bytes`: on CPUs, device memory is container memory."""
    assert isinstance(config, WorkerConfig)
    limit = parse_size_bytes(container["resources"]["limits"]["memory"] + "b")
    if config.device == "cpu" and limit <= config.memory_bytes:
        yield "the memory limit leaves nothing beyond 'memory_bytes'"


def _services(known: Mapping[str, Object]) -> Iterator[str]:
    """Every port of a Service is a port of the selected pods."""
    pods = [obj["spec"]["template"] for obj in known.values() if "template" in obj.get("spec", {})]
    for obj in known.values():
        if obj["kind"] != "Service":
            continue
        selector = obj["spec"]["selector"].items()
        names = [
            {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
            for pod in pods
            if selector <= pod["metadata"]["labels"].items()
        ]
        if not names:
            yield f"Service {obj['metadata']['name']} selects no pods"
        for port in obj["spec"]["ports"]:
            if any(port["targetPort"] not in own for own in names):
                yield f"Service {obj['metadata']['name']}: no port {port['targetPort']} in its pods"
