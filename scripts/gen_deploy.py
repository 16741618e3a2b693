"""Make what is generated below deploy/: the Helm chart, and the alerts as an object of Kubernetes.

The sources are the kustomizations, deploy/helm/parameters.yaml and the rules of Prometheus. With
--check nothing is written, and the exit status says whether the files are what would be written.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from deploy_chart import (
    CPU,
    FEATURES,
    VALUE_OF,
    VARIANTS,
    Parameter,
    Templates,
    parse_parameters,
)
from deploy_objects import DEPLOY, ROOT, Object, ToolMissing, Variant, build_variant, identity

HELM = DEPLOY / "helm"
CHART = HELM / "tideserve"
RULES = DEPLOY / "observability" / "prometheus" / "rules.yaml"
RULE_OBJECT = DEPLOY / "components" / "monitoring" / "prometheus_rule.yaml"
NOTICE = "# Made by scripts/gen_deploy.py from the kustomizations; do not edit.\n"
KUBE_VERSION = ">=1.30.0-0"  # the sleep before SIGTERM
SWITCHES = {
    "etcd": "etcd of one member with a volume; false: your own, see etcd.url.",
    "monitoring": "ServiceMonitor and PrometheusRule, for the Prometheus operator.",
    "keda": "ScaledObject for the workers, for KEDA.",
    "tls": "Mutual TLS between services and to etcd, TLS for clients.",
    "etcd-credentials": "User and password at etcd, from a Secret.",
    "api-keys": "Keys of clients and admins with owners and quotas, in place of the one key.",
    "cert-manager": "Issuer and certificates for tls, for cert-manager.",
}
TREE = dict[str, Any]


def main() -> int:
    """1 after --check found a difference or if the sources make no chart, 77 without kustomize."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    check = parser.parse_args().check
    try:
        if not check:
            RULE_OBJECT.write_text(rule_object(RULES.read_text()))
        files = {} if check else chart_files()
        problems = differences() if check else []
    except ToolMissing as error:
        print(error, file=sys.stderr)
        return 77
    except ValueError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"gen_deploy: {problem}", file=sys.stderr)
    if check or problems:
        return 1 if problems else 0
    for path in CHART.rglob("*"):
        if path.is_file():
            path.unlink()
    for name, text in files.items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def differences() -> list[str]:
    """A sentence for each file that is not what its sources make. Raises as `chart_files`."""
    files = chart_files()
    present = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()}
    paths = [] if RULE_OBJECT.read_text() == rule_object(RULES.read_text()) else [RULE_OBJECT]
    paths += [
        CHART / name
        for name in sorted(present | set(files))
        if name not in present or (CHART / name).read_text() != files.get(name)
    ]
    return [
        f"{path.relative_to(ROOT)} is not what its sources make; run scripts/gen_deploy.py"
        for path in paths
    ]


def rule_object(rules: str) -> str:
    """The rules of Prometheus as an object for its operator, which takes no files."""
    labels = {"app.kubernetes.io/name": "tideserve", "app.kubernetes.io/part-of": "tideserve"}
    one = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tideserve", "labels": labels},
        "spec": {"groups": yaml.safe_load(rules)["groups"]},
    }
    source = RULES.relative_to(ROOT)
    notice = f"# Made by scripts/gen_deploy.py from {source}; do not edit.\n"
    return notice + yaml.safe_dump(one, sort_keys=False, width=100)


def chart_files() -> dict[str, str]:
    """The text of every file of the chart by its path in it.

    Raises:
        ToolMissing: without kustomize.
        ValueError: if the manifests or parameters do not fit together.
    """
    parameters = parse_parameters(yaml.safe_load((HELM / "parameters.yaml").read_text()))
    built = {variant: build_variant(variant) for variant in VARIANTS}
    templates = Templates(parameters)
    files = {f"templates/{name}": text for name, text in template_files(templates, built).items()}
    defaults = templates.defaults(CPU)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    files["Chart.yaml"] = NOTICE + yaml.safe_dump(
        {
            "apiVersion": "v2",
            "name": "tideserve",
            "description": "An LLM serving system whose parameters ebb when the KV cache floods",
            "type": "application",
            "version": version,
            "appVersion": version,
            "kubeVersion": KUBE_VERSION,
        },
        sort_keys=False,
    )
    files["values.yaml"] = NOTICE + "".join(value_lines(values_tree(parameters, defaults, version)))
    for variant in VARIANTS:
        if variant != CPU:
            files[values_file(variant)] = NOTICE + yaml.safe_dump(
                nested(variant_values(templates, variant))
            )
    files["values.schema.json"] = json.dumps(values_schema(parameters), indent=2) + "\n"
    files["templates/NOTES.txt"] = (
        "Clients reach tideserve at http://tideserve-gateway.{{ .Release.Namespace }}.svc:8000/v1"
        " with\n"
        "{{- if .Values.apiKeys.enabled }} a key whose hash is in the Secret"
        " {{ .Values.apiKeys.secret }}\n{{- else }} the key in the Secret"
        " {{ .Values.gateway.apiKeySecret }}\n{{- end }}; see docs/kubernetes.md.\n"
    )
    return files


def values_files(variant: Variant) -> list[str]:
    """The values files of the chart that together make it render `variant`."""
    if variant in VARIANTS:
        return [] if variant == CPU else [values_file(variant)]
    parts = [Variant(features=frozenset({name})) for name in sorted(variant.features)]
    device = [Variant(device=variant.device)] if variant.device != CPU.device else []
    return [values_file(part) for part in (*device, *parts)]


def values_file(variant: Variant) -> str:
    """The name of the values that make the chart render `variant`."""
    return f"values-{variant.name.removeprefix('cpu+').replace('+', '-')}.yaml"


def variant_values(templates: Templates, variant: Variant) -> TREE:
    """The values, dots in their names, in which `variant` differs from the chart's defaults."""
    switches = {
        f"{VALUE_OF.get(feature, feature)}.enabled": variant.has(feature)
        for feature in ("etcd", *FEATURES)
        if variant.has(feature) != CPU.has(feature)
    }
    device = {"device": variant.device} if variant.device != CPU.device else {}
    defaults = templates.defaults(CPU)
    values = templates.defaults(variant)
    return (
        device
        | switches
        | {name: values[name] for name in values if values[name] != defaults[name]}
    )


def template_files(
    templates: Templates, built: Mapping[Variant, Iterable[Object]]
) -> dict[str, str]:
    """The templates, one for each kind of object."""
    versions: dict[str, dict[Variant, Object]] = {}
    for variant, objects in built.items():
        for one in objects:
            versions.setdefault(identity(one), {})[variant] = one
    files: dict[str, str] = {}
    for name, having in versions.items():
        file = f"{name.partition('/')[0].lower()}.yaml"
        files.setdefault(file, NOTICE)
        files[file] += templates.object(having, list(built))
    return files


def nested(flat: Mapping[str, Any]) -> TREE:
    """A tree of mappings from values with dots in their names."""
    tree: TREE = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def values_tree(parameters: Iterable[Parameter], defaults: TREE, version: str) -> TREE:
    """Pairs of help and default, in the tree of values."""
    rows: dict[str, tuple[str, Any]] = {
        "device": ("cpu, or gpu with values-gpu.yaml.", "cpu"),
        "image.registry": ("Before the name of each image, such as registry.example/team/.", ""),
        "image.tag": ("Tag of the images; those of workers have -cpu or -cuda after it.", version),
    }
    for feature, help_text in SWITCHES.items():
        rows[f"{VALUE_OF.get(feature, feature)}.enabled"] = (help_text, feature == "etcd")
    for parameter in parameters:
        rows[parameter.value] = (parameter.help, defaults[parameter.value])
    return nested(rows)


def value_lines(tree: TREE, indent: int = 0) -> list[str]:
    """The tree of values as YAML with the help as comments."""
    lines = []
    space = " " * indent
    for key, node in tree.items():
        if isinstance(node, tuple):
            help_text, default = node
            lines += [f"{space}# {help_text}\n", f"{space}{key}: {json.dumps(default)}\n"]
        else:
            lines += [f"{space}{key}:\n", *value_lines(node, indent + 2)]
    return lines


def values_schema(parameters: Iterable[Parameter]) -> TREE:
    """The JSON schema of values, which knows every value and refuses all others."""
    rows: TREE = {
        "device": {"type": "string", "enum": ["cpu", "gpu"]},
        "image.registry": {"type": "string", "pattern": "^$|/$"},
        "image.tag": {"type": "string", "minLength": 1},
    }
    for feature in ("etcd", *FEATURES):
        rows[f"{VALUE_OF.get(feature, feature)}.enabled"] = {"type": "boolean"}
    for parameter in parameters:
        rows[parameter.value] = {"description": parameter.help, **parameter.schema}
    schema: TREE = {"$schema": "http://json-schema.org/draft-07/schema#", **_closed()}
    # Helm passes it to every chart.
    schema["properties"]["global"] = {"type": "object"}
    for name, row in rows.items():
        *parents, leaf = name.split(".")
        node = schema
        for parent in parents:
            node = node["properties"].setdefault(parent, _closed())
        node["properties"][leaf] = row
    return schema


def _closed() -> TREE:
    return {"type": "object", "additionalProperties": False, "properties": {}}


if __name__ == "__main__":
    sys.exit(main())
