"""Check deploy/ and the compose files: manifests, chart, and their agreement with the code.

Exit status: 0; 1 if a check failed; 77 if no check failed but a tool is missing (0 with
--if-possible). --fetch first downloads missing tools into the cache folder.
"""

import argparse
import json
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from deploy_config import check_objects, compose_services, read_config
from deploy_objects import (
    CPU,
    DEPLOY,
    FEATURES,
    ROOT,
    VARIANTS,
    Object,
    ToolMissing,
    Variant,
    build_variant,
    identity,
    parsed,
    run_tool,
)
from deploy_tools import fetch, kubernetes_schemas, renderer

from services.common.errors import ConfigError

KUBERNETES = "1.32"
RENDER_TIMEOUT_S = 30
CHART = DEPLOY / "helm" / "tideserve"
EXAMPLES = tuple(DEPLOY / "helm" / name for name in ("example-values.yaml", "example-models.yaml"))
EXAMPLE_VERSION = "1.2.3"
ROLES = CHART / "values-roles.yaml"  # the kustomization has no Deployment per role
MODELS = DEPLOY / "helm" / "example-models.yaml"
NAME, OTHER_NAME = "tideserve", "another-release"
# The names of Secrets are values, too.
RENAMED = {
    "fullnameOverride": OTHER_NAME,
    "apiKeys": {"secret": f"{OTHER_NAME}-api-keys"},
    "batches": {"secret": f"{OTHER_NAME}-batches"},
    "gateway": {"apiKeySecret": f"{OTHER_NAME}-api-key"},
}
NOT_POSSIBLE = 77
EVERYTHING = frozenset(FEATURES)
# Variants with a values file, and variants that combine several.
SETS = (*VARIANTS, Variant(features=EVERYTHING), Variant(device="gpu", features=EVERYTHING))


def strict_schemas() -> Iterator[str]:
    """Every object is valid for Kubernetes or for the operator of its kind."""
    kubernetes_schemas()
    import kubernetes_validate  # type: ignore[import-not-found]

    own = {}
    for path in (DEPLOY / "schemas").glob("*.json"):
        own[path.stem] = jsonschema.Draft7Validator(json.loads(path.read_text()))
    sets = {variant.name: build_variant(variant) for variant in SETS}
    charts = (*EXAMPLES, ROLES)
    sets |= {f"chart with {path.name}": _rendered([path]) for path in charts}
    sets |= {path.name: parsed(path.read_text()) for path in DEPLOY.glob("*.yaml")}
    for name, objects in sets.items():
        for obj in objects:
            # Kinds of operators have their schema in deploy/schemas.
            validator = own.get(obj["kind"].lower())
            try:
                if validator is not None:
                    validator.validate(obj)
                else:
                    kubernetes_validate.validate(obj, KUBERNETES, strict=True)
            except jsonschema.ValidationError as error:
                yield f"{name}: {identity(obj)}: {error.message}"
            except kubernetes_validate.SchemaNotFoundError:
                yield f"{name}: there is no schema for the kind of {identity(obj)}"


def code_and_manifests() -> Iterator[str]:
    """Settings, ports, probes, drains and images match the services."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for variant in SETS:
        for problem in check_objects(build_variant(variant), version):
            yield f"{variant.name}: {problem}"


def code_and_chart() -> Iterator[str]:
    """The chart matches the code with non-default values."""
    own = str(_parsed(CHART / "values.yaml")["image"]["tag"])
    for path, version in (*((example, EXAMPLE_VERSION) for example in EXAMPLES), (ROLES, own)):
        for problem in check_objects(_rendered([path]), version):
            yield f"chart with {path.name}: {problem}"


def compose_files() -> Iterator[str]:
    """Services accept the environment that the compose files set."""
    first = ROOT / "compose.yaml"
    whole = dict(compose_services(_parsed(first))) if first.is_file() else {}
    for path in sorted(ROOT.glob("compose*.yaml")):
        for service, environment in compose_services(_parsed(path)):
            try:
                read_config(service, whole.get(service, {}) | environment)
            except ConfigError as error:
                yield f"{path.name}: {service}: {error}"


def chart_values() -> Iterator[str]:
    """values.schema.json accepts every values file and rejects unknown names."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    defaults = _parsed(CHART / "values.yaml")
    for path in (*EXAMPLES, *sorted(CHART.glob("values*.yaml"))):
        for error in validator.iter_errors(_parsed(path)):
            yield f"{path.name}: {error.message}"
    for wrong in _typos(defaults):
        if validator.is_valid(wrong):
            yield f"the schema accepts the unknown value in {json.dumps(wrong)[:200]}"


def values_files(variant: Variant) -> list[Path]:
    """The values files with which the chart renders `variant`."""
    parts = [variant]
    if variant not in VARIANTS:
        parts = [Variant(device=variant.device)]
        parts += [Variant(features=frozenset({name})) for name in sorted(variant.features)]
    names = [part.name.removeprefix("cpu+").replace("+", "-") for part in parts if part != CPU]
    return [CHART / f"values-{name}.yaml" for name in names]


def chart_equality() -> Iterator[str]:
    """The chart renders to the objects that kustomize builds."""
    for variant in SETS:
        expected = {identity(obj): _unordered(obj) for obj in build_variant(variant)}
        rendered = {identity(obj): _unordered(obj) for obj in _rendered(values_files(variant))}
        for name in sorted(expected.keys() ^ rendered.keys()):
            where = "chart" if name in rendered else "kustomization"
            yield f"{variant.name}: {name} is only in the {where}"
        for name in sorted(expected.keys() & rendered.keys()):
            if expected[name] != rendered[name]:
                yield f"{variant.name}: {name} differs between chart and kustomization"


def chart_names() -> Iterator[str]:
    """With `fullnameOverride`, the objects are the same but for the beginning of all names."""
    with tempfile.TemporaryDirectory() as folder:
        renamed = Path(folder, "values.yaml")
        renamed.write_text(yaml.safe_dump(RENAMED))
        sets = {variant.name: values_files(variant) for variant in SETS}
        sets |= {path.name: [path] for path in (ROLES, MODELS)}
        for name, files in sets.items():
            objects = _rendered([*files, renamed])
            own_etcd = any(obj["kind"] == "StatefulSet" for obj in objects)
            for obj in objects:
                if not obj["metadata"]["name"].startswith(OTHER_NAME):
                    yield f"{name}: {identity(obj)} keeps its name"
                for text in _names(obj):
                    # The address of another etcd is the user's.
                    if own_etcd or not text.endswith("-etcd:2379"):
                        yield f"{name}: {identity(obj)} still has {text}"
            back = json.loads(json.dumps(objects).replace(OTHER_NAME, NAME))
            if back != json.loads(json.dumps(_rendered(files))):
                yield f"{name}: objects differ by more than their names"


def _names(node: Any) -> Iterator[str]:
    """The texts in an object that begin with the default name, but for images and alerts."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in ("image", "groups"):
                yield from _names(value)
    elif isinstance(node, list):
        for item in node:
            yield from _names(item)
    elif isinstance(node, str) and re.match(rf"(https?://)?{NAME}(-|$)", node):
        yield node


CHECKS: dict[str, Callable[[], Any]] = {
    "compose files against the code": compose_files,
    "values of the chart": chart_values,
    "manifests against the code": code_and_manifests,
    "chart against the code": code_and_chart,
    f"manifests against the schemas of Kubernetes {KUBERNETES}": strict_schemas,
    "chart against manifests": chart_equality,
    "names of the chart": chart_names,
}


def main() -> int:
    """Run the checks; see the module docstring for the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fetch", action="store_true", help="fetch missing tools first")
    parser.add_argument(
        "--if-possible", action="store_true", help="exit 0 even if a tool is missing"
    )
    arguments = parser.parse_args()
    for sentence in fetch() if arguments.fetch else ():
        print(f"check-deploy: {sentence}")
    failed = missing = 0
    for name, check in CHECKS.items():
        started_s = time.monotonic()
        try:
            problems = list(check())
        except ToolMissing as error:
            print(f"    {name}: NOT CHECKED: {error}", flush=True)
            missing += 1
            continue
        except ValueError as error:
            problems = [str(error)]
        for problem in problems:
            print(f"    {name}: {problem}")
        failed += bool(problems)
        result = "FAILED" if problems else "passed"
        print(f"    {name}: {result} in {time.monotonic() - started_s:.1f} s", flush=True)
    if failed:
        return 1
    return NOT_POSSIBLE if missing and not arguments.if_possible else 0


def _parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _typos(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Values with an unknown name, at each level of the tree of values."""
    yield {**tree, "replicaz": 1}
    services = ("gateway", "scheduler", "memmgr", "worker")
    for key in ("image", "etcd", "model", "apiKeys", "keda", *services):
        yield {**tree, key: {**tree[key], "replicaz": 1}}


def _rendered(files: Sequence[Path]) -> list[Object]:
    """The objects of the chart rendered with the values in `files`. Raises ToolMissing."""
    command = [str(renderer()), str(CHART), *map(str, files)]
    return parsed(run_tool(command, "the chart cannot be rendered", RENDER_TIMEOUT_S))


def _unordered(node: Any) -> Any:
    """The node with the variables of each environment sorted by name.

    Kustomize puts patched variables first; the order is irrelevant without cross-references.
    """
    if isinstance(node, dict):
        return {
            key: sorted(value, key=lambda row: row["name"]) if key == "env" else _unordered(value)
            for key, value in node.items()
        }
    return [_unordered(item) for item in node] if isinstance(node, list) else node


if __name__ == "__main__":
    sys.exit(main())
