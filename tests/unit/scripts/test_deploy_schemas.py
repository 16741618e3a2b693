"""The schemas in deploy/ accept the manifests and refuse mistakes."""

import copy
import json
import re
import tomllib

import jsonschema
import pytest
import yaml
from deploy_objects import DEPLOY

CHART = DEPLOY / "helm" / "tideserve"
SERVICES = ("gateway", "memmgr", "scheduler", "worker")
BY_HELPERS = ("podAnnotations", "nodeSelector", "tolerations", "affinity", "imagePullSecrets")
OBJECTS = {
    "scaledobject": DEPLOY / "components" / "keda" / "scaled_object.yaml",
    "servicemonitor": DEPLOY / "components" / "monitoring" / "service_monitor.yaml",
    "prometheusrule": DEPLOY / "components" / "monitoring" / "prometheus_rule.yaml",
    "httproute": DEPLOY / "components" / "http-route" / "http_route.yaml",
    "inferencepool": DEPLOY / "components" / "inference-pool" / "inference_pool.yaml",
    "certificate": DEPLOY / "components" / "cert-manager" / "certificates.yaml",
    "issuer": DEPLOY / "components" / "cert-manager" / "issuers.yaml",
}


def validator(kind):
    schema = json.loads((DEPLOY / "schemas" / f"{kind}.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def first(kind):
    objects = yaml.safe_load_all(OBJECTS[kind].read_text())
    return next(manifest for manifest in objects if manifest["kind"].lower() == kind)


def test_every_schema_has_an_object():
    assert {path.stem for path in (DEPLOY / "schemas").glob("*.json")} == set(OBJECTS)


@pytest.mark.parametrize("kind", OBJECTS)
def test_committed_manifests_are_valid(kind):
    for manifest in yaml.safe_load_all(OBJECTS[kind].read_text()):
        if manifest["kind"].lower() == kind:
            validator(kind).validate(manifest)


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_unknown_field_is_refused(kind):
    wrong = copy.deepcopy(first(kind))
    wrong["spec"]["specc"] = {}
    assert not validator(kind).is_valid(wrong)
    wrong = copy.deepcopy(first(kind))
    wrong["metadata"]["lables"] = {}
    assert not validator(kind).is_valid(wrong)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("scaledobject", lambda spec: spec["triggers"][0]["metadata"].pop("threshold")),
        ("scaledobject", lambda spec: spec["triggers"][0]["metadata"].update(threshold=8)),
        ("scaledobject", lambda spec: spec["scaleTargetRef"].pop("name")),
        ("scaledobject", lambda spec: spec.update(maxReplicaCount="8")),
        ("servicemonitor", lambda spec: spec["endpoints"][0].update(interval="15")),
        ("servicemonitor", lambda spec: spec.pop("selector")),
        ("prometheusrule", lambda spec: spec["groups"][0]["rules"][0].pop("expr")),
        ("prometheusrule", lambda spec: spec["groups"][0]["rules"][0].update({"for": 30})),
        ("certificate", lambda spec: spec.pop("issuerRef")),
        ("certificate", lambda spec: spec.update(duration="90d")),
        ("issuer", lambda spec: spec.update(ca={"secretName": "too"})),
    ],
)
def test_an_invalid_value_is_refused(kind, change):
    wrong = copy.deepcopy(first(kind))
    change(wrong["spec"])
    assert not validator(kind).is_valid(wrong)


def values_validator():
    return jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))


def defaults(values, schema, path=""):
    """Each value of the chart whose schema is no group of others."""
    for name, value in values.items():
        inner = schema["properties"].get(name, {})
        if "properties" in inner:
            yield from defaults(value, inner, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def known_by(schema, path=""):
    for name, inner in schema["properties"].items():
        yield from known_by(inner, f"{path}{name}.") if "properties" in inner else [path + name]


def test_schema_values_and_templates_have_the_same_keys():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = values_validator().schema
    known = set(defaults(values, schema))
    assert known == set(known_by(schema)) - {"global"}  # Helm passes that one to every chart
    texts = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+\w)", texts))
    services = {name for name in used if name in SERVICES}  # passed to a helper as a whole
    assert services == set(SERVICES)
    assert used - services <= known
    placement = {f"{service}.{name}" for service in SERVICES for name in BY_HELPERS}
    assert known - used == placement


def test_the_chart_has_the_version_of_the_project():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    versions = {chart["version"], chart["appVersion"], values["image"]["tag"]}
    assert versions == {project["version"]}


@pytest.mark.parametrize("path", sorted(CHART.glob("values*.yaml")), ids=lambda path: path.name)
def test_committed_values_files_are_valid(path):
    values_validator().validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "values",
    [
        {"gatway": {}},
        {"gateway": {"replica": 2}},
        {"gateway": {"replicas": 0}},
        {"gateway": {"replicas": "2"}},
        {"device": "tpu"},
        {"image": {"registry": "registry.example"}},
        {"config": {"LOG_LEVEL": "debug"}},
        {"worker": {"dtype": "float16"}},
        {"etcd": {"prefix": "tideserve"}},
        {"gateway": {"extraEnv": [{"value": "1"}]}},
    ],
    ids=str,
)
def test_invalid_values_are_refused(values):
    assert not values_validator().is_valid(values)
