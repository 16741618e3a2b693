"""The check of manifests against the code reports each kind of mistake."""

import copy
import json

import pytest
import yaml
from deploy_config import (
    CONFIGS,
    SECRET,
    check_objects,
    compose_services,
    environment_of,
    read_config,
)
from deploy_objects import CPU_OVERLAY, ROOT, ToolMissing, Variant, build, build_variant, identity

from services.common.errors import ConfigError
from services.common.setting import values_of
from services.core.queue_order import Scheduling

VERSION = "0.1.0"


@pytest.fixture(scope="module")
def built():
    try:
        return build(CPU_OVERLAY)
    except ToolMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def objects(built):
    return copy.deepcopy(built)


def deployment(objects, service):
    return next(
        manifest for manifest in objects if identity(manifest) == f"Deployment/tideserve-{service}"
    )


def container(objects, service):
    return deployment(objects, service)["spec"]["template"]["spec"]["containers"][0]


def variable(objects, service, name):
    return next(row for row in container(objects, service)["env"] if row["name"] == name)


def test_the_manifests_have_no_faults(objects):
    assert check_objects(objects, VERSION) == []


def test_workers_get_zone_and_node_variables(objects):
    rows = container(objects, "worker")["env"]
    names = [row["name"] for row in rows]
    location = variable(objects, "worker", "TIDESERVE__LOCATION")["value"]
    used = [part.removeprefix("$(").removesuffix(")") for part in location.split("/")]
    assert used == ["NODE_ZONE", "NODE_NAME"], "the widest part first"
    for name in used:
        assert "fieldRef" in variable(objects, "worker", name)["valueFrom"]
        assert names.index(name) < names.index("TIDESERVE__LOCATION"), "or it is not expanded"


def test_scheduler_and_workers_get_the_same_scheduling(objects):
    known = {identity(manifest): manifest for manifest in objects}
    known["ConfigMap/tideserve-scheduling"]["data"]["SCHEDULING"] = "slo"
    for service in ("scheduler", "worker"):
        config = read_config(service, environment_of(container(objects, service), known))
        assert values_of(config)["scheduling"] == "slo"
    schema = json.loads((ROOT / "deploy/helm/tideserve/values.schema.json").read_text())
    assert schema["properties"]["scheduling"]["enum"] == list(Scheduling)


@pytest.mark.parametrize(
    ("service", "name", "value", "problem"),
    [
        ("worker", "TIDESERVE__MEMROY_BYTES", "1", "did you mean TIDESERVE__MEMORY_BYTES"),
        ("gateway", "TIDESERVE__DRAIN_TIMEOUT_S", "-1", "DRAIN_TIMEOUT_S"),
        ("worker", "TIDESERVE__BULK_PORT", "50099", "port bulk is 50062, but 'bulk_port' is 50099"),
        ("worker", "TIDESERVE__UCX_PORTS", "1-9", "no NetworkPolicy allows ingress from worker to"),
        ("worker", "TIDESERVE__UCX_PORTS", "1-9", "allows egress from worker to worker at 1-9"),
        ("worker", "TIDESERVE__MEMORY_BYTES", "4GiB", "leaves nothing"),
    ],
)
def test_an_unknown_variable_is_reported(objects, service, name, value, problem):
    rows = container(objects, service)["env"]
    rows[:] = [row for row in rows if row["name"] != name] + [{"name": name, "value": value}]
    assert any(problem in line for line in check_objects(objects, VERSION))


@pytest.mark.parametrize(
    ("changed", "path", "value", "problem"),
    [
        ("ConfigMap/tideserve", "metadata/name", "x", "gateway: there is no ConfigMap tideserve"),
        (
            "Deployment/tideserve-memmgr",
            "spec/template/spec/containers/0/readinessProbe/grpc/service",
            *("tideserve.memmgr.v1.MemoryService", "does not serve"),
        ),
        (
            *("Deployment/tideserve-gateway", "spec/template/spec/terminationGracePeriodSeconds"),
            *(324, "terminationGracePeriodSeconds is shorter than the 325 s of sleep and drain"),
        ),
        (
            *("Deployment/tideserve-scheduler", "spec/template/spec/containers/0/image"),
            *("tideserve-scheduler:latest", "not of version"),
        ),
        (
            *("Service/tideserve-worker", "spec/ports/0/targetPort", "http"),
            "Service tideserve-worker: no port http in its pods",
        ),
    ],
)
def test_an_unknown_field_is_reported(objects, changed, path, value, problem):
    part = next(each for each in objects if identity(each) == changed)
    *parents, last = path.split("/")
    for key in parents:
        part = part[int(key) if key.isdigit() else key]
    part[last] = value
    assert problem in check_objects(objects, VERSION)[0]


def test_further_deployments_of_workers_are_checked(objects):
    second = copy.deepcopy(deployment(objects, "worker"))
    second["metadata"]["name"] = "tideserve-worker-2"
    label = {"tideserve/upstream": "2"}
    second["spec"]["template"]["metadata"]["labels"] |= label
    second["spec"]["selector"]["matchLabels"] |= label
    container_of = second["spec"]["template"]["spec"]["containers"][0]
    container_of["env"].append({"name": "TIDESERVE__UPSTREAM_ULR", "value": "http://a"})
    problems = check_objects([*objects, second], VERSION)
    assert any(
        line.startswith("tideserve-worker-2: ") and "TIDESERVE__UPSTREAM_URL" in line
        for line in problems
    )
    selects = "Deployment/tideserve-worker selects the pods of"
    assert any(line.startswith(selects) and line.endswith("worker-2") for line in problems)


def test_unmounted_and_never_updated_files_are_reported(objects):
    mounts = container(objects, "gateway")["volumeMounts"]
    mount = next(mount for mount in mounts if mount["name"] == "api-key")
    mount["subPath"] = "api_key"
    assert "never updates" in check_objects(objects, VERSION)[0]
    mounts.remove(mount)
    assert "in no mount" in check_objects(objects, VERSION)[0]


def test_the_keys_component_replaces_the_single_key(objects):
    with_keys = build_variant(Variant(features=frozenset({"api-keys"})))
    pod = deployment(with_keys, "gateway")["spec"]["template"]["spec"]
    secrets = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
    assert secrets == {"api-keys": {"secretName": "tideserve-api-keys", "defaultMode": 0o440}}
    known = {identity(manifest): manifest for manifest in with_keys}
    config = read_config("gateway", environment_of(pod["containers"][0], known))
    assert config.api_key is None
    assert str(config.api_keys_file) == "/run/secrets/tideserve/api-keys/keys.jsonl"


def test_the_component_of_batches_sets_the_database_and_a_shared_folder(objects):
    with_batches = build_variant(Variant(features=frozenset({"batches"})))
    pod = deployment(with_batches, "gateway")["spec"]["template"]["spec"]
    known = {identity(manifest): manifest for manifest in with_batches}
    config = read_config("gateway", environment_of(pod["containers"][0], known))
    assert config.batches.batch_files == "/var/lib/tideserve/batches"
    assert known["PersistentVolumeClaim/tideserve-batch-files"]["spec"]["accessModes"] == [
        "ReadWriteMany"
    ]


def test_pods_get_no_token_and_no_service_links(objects):
    for service in CONFIGS:
        pod = deployment(objects, service)["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_compose_services_are_read_as_compose_does():
    text = yaml.safe_load(
        """
        services:
          worker: {environment: {TIDESERVE__PORT: 1, TIDESERVE__DTYPE: "${DTYPE:-float32}"}}
          scheduler: {environment: ["TIDESERVE__PORT=2"]}
          model: {environment: [MODEL]}
        """
    )
    assert dict(compose_services(text)) == {
        "worker": {"TIDESERVE__PORT": "1", "TIDESERVE__DTYPE": "float32"},
        "scheduler": {"TIDESERVE__PORT": "2"},
    }


def test_secret_files_need_not_exist_here():
    environment = {
        "TIDESERVE__ETCD_URL": "http://etcd:2379",
        "TIDESERVE__ETCD_USER": "tideserve",
        "TIDESERVE__ETCD_PASSWORD_FILE": "/run/secrets/absent",
    }
    assert read_config("scheduler", environment).etcd_password == SECRET
    with pytest.raises(ConfigError):
        read_config("scheduler", environment | {"TIDESERVE__QUEUE_LIMIT": "0"})


@pytest.mark.parametrize(
    "path", [*ROOT.glob("compose*.yaml"), ROOT / "docker" / "compose.test.yaml"], ids=str
)
def test_compose_files_use_known_settings(path):
    whole = dict(compose_services(yaml.safe_load((ROOT / "compose.yaml").read_text())))
    for service, environment in compose_services(yaml.safe_load(path.read_text())):
        assert read_config(service, whole.get(service, {}) | environment)
