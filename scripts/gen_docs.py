"""Generate pages from the code, or check that they are up to date.

docs/configuration.md    every option of every service and of `tideserve up`
docs/metrics.md          every metric of every service
docs/fields.md           every field of a chat and a completion request
docs/grpc.md             its table of errors
docs/states.md           a diagram of every state machine of core with a transition table
docs/support.md          engines, models and APIs, and the groups that merge
docs/vllm-flags.md       flags of `vllm serve` and the corresponding settings
deploy/components/monitoring/prometheus_rule.yaml, and its template in the chart: the alerts

In the first four, the text around the tables is written by hand.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import support_matrix as support  # noqa: E402
import vllm_flags  # noqa: E402
from fields_reference import ENDPOINTS, fields_of  # noqa: E402
from metrics_reference import reference  # noqa: E402
from state_diagrams import page as states  # noqa: E402

from services.common.service_config import ServiceConfig  # noqa: E402
from services.common.setting import Setting, settings_of  # noqa: E402
from services.common.settings import variable  # noqa: E402
from services.gateway.grpc import errors as grpc_errors  # noqa: E402
from tideserve.cli.cluster_options import CONFIGS, SECTIONS, ClusterOptions  # noqa: E402
from tideserve.client.errors import kind_of  # noqa: E402

SERVICES = {
    "gateway": "Gateway",
    "scheduler": "Scheduler",
    "memmgr": "Memory manager",
    "worker": "Worker",
}
GENERATED = "<!-- generated -->\n"
RULES = "deploy/observability/prometheus/rules.yaml"
BEGIN = "<!-- from here on made by `make gen` -->\n"
END = "<!-- up to here -->\n"


def configuration() -> str:
    """The page of all options."""
    shared = settings_of(ServiceConfig)
    parts = ["## All services\n", _key_table(list(shared.values()))]
    for name, title in SERVICES.items():
        own = [setting for key, setting in settings_of(CONFIGS[name]).items() if key not in shared]
        parts += [f"## {title}\n", _key_table(own)]
    return _fill_generated("configuration", "\n".join(parts), _up_table())


def metrics() -> str:
    """The page of all metrics."""
    parts = []
    for name, entries in reference().items():
        parts.append(f"## {SERVICES.get(name, 'All services')}\n")
        lines = [
            (
                f"`{entry.name}`",
                entry.kind,
                ", ".join(f"`{label}`" for label in entry.labels),
                entry.help,
            )
            for entry in entries
        ]
        parts.append(table(("metric", "type", "labels", "what it is"), lines))
    return _fill_generated("metrics", "\n".join(parts))


def fields() -> str:
    """The page of all fields of requests."""
    parts = []
    for endpoint in ENDPOINTS:
        rows = [(f"`{row.name}`", row.effect, row.values, row.note) for row in fields_of(endpoint)]
        parts.append(f"## {endpoint}\n")
        parts.append(table(("field", "effect", "values", "what to know"), rows))
    return _fill_generated("fields", "\n".join(parts))


def grpc() -> str:
    """The page on gRPC, with its table of errors."""
    lines = {
        (kind_of(code, reason).__name__, f"`{code.name}`", f"`{reason}`", str(error.status))
        for error, code in grpc_errors.TABLE.items()
        for reason in (grpc_errors.reason_of(error("an error")),)
    }
    rows = [(f"`{name}`", *others) for name, *others in sorted(lines)]
    return _fill_generated("grpc", table(("Python", "gRPC", "reason", "HTTP"), rows))


def supported() -> str:
    """The page of supported engines, models and APIs."""
    sections = (
        ("Engines", ("engine", "device", "dtypes", "models", "state"), support.engines()),
        (
            "Architectures of tideserve's engine",
            ("architecture", "biases", "norms of heads", "sliding windows"),
            support.families(),
        ),
        ("Parts of models", ("part", "supported"), support.parts()),
        ("Groups that merge", ("workers", "in an overload"), support.MERGES),
        ("HTTP", ("API", "route", "answer"), support.http_routes()),
        ("gRPC", ("API", "service", "methods"), support.grpc_methods()),
    )
    tables = [f"\n## {title}\n\n{table(columns, lines)}" for title, columns, lines in sections]
    return f"{GENERATED}# What is supported\n\n{support.INTRODUCTION}\n" + "".join(tables)


def flags_of_vllm() -> str:
    """The page of the flags of vLLM."""
    columns = ("vLLM", "tideserve", "note")
    return f"{GENERATED}{vllm_flags.INTRODUCTION}\n{table(columns, list(vllm_flags.rows()))}"


def _fill_generated(page: str, *made: str) -> str:
    """The page of docs/ with its generated parts replaced by `made`."""
    first, *parts = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split(BEGIN)
    rest = [part.partition(END)[2] for part in parts]
    return first + "".join(f"{BEGIN}{new}{END}{old}" for new, old in zip(made, rest, strict=True))


def alerts(name: str = "tideserve") -> str:
    """The Prometheus rules as an object for its operator, which reads no files."""
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": name}
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": labels},
        "spec": {"groups": yaml.safe_load((ROOT / RULES).read_text())["groups"]},
    }
    notice = f"# Made by `make gen` from {RULES}; do not edit.\n"
    return notice + yaml.safe_dump(rule, sort_keys=False, width=100)


def alerts_template() -> str:
    """The template of the rules in the chart, with the braces of Prometheus' templates escaped."""
    name = "NAME_OF_THE_RELEASE"
    escaped = alerts(name).replace("{{", '{{ "{{" }}')
    escaped = escaped.replace(name, '{{ include "tideserve.fullname" . | quote }}')
    return f"{{{{- if .Values.monitoring.enabled }}}}\n---\n{escaped}{{{{- end }}}}\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": configuration,
    "docs/metrics.md": metrics,
    "docs/fields.md": fields,
    "docs/grpc.md": grpc,
    "docs/states.md": lambda: GENERATED + states(),
    "docs/support.md": supported,
    "docs/vllm-flags.md": flags_of_vllm,
    "deploy/components/monitoring/prometheus_rule.yaml": alerts,
    "deploy/helm/tideserve/templates/prometheusrule.yaml": alerts_template,
}


def _key_table(settings: Sequence[Setting]) -> str:
    return table(
        ("key", "environment", "values", "default", "what it is"),
        [
            (
                f"`{setting.key}`",
                f"`{variable(setting.key)}`",
                setting.values_text,
                setting.default_text,
                f"**Secret.** {setting.help}" if setting.secret else setting.help,
            )
            for setting in settings
            if "expert" not in setting.metadata
        ],
    )


def _up_table() -> str:
    return table(
        ("flag", "key", "values", "default", "what it is", "passed on as"),
        [
            (
                f"`--{key.replace('_', '-')}`",
                f"`{key}`",
                setting.values_text,
                setting.default_text,
                setting.help,
                _passed_on(setting),
            )
            for key, setting in settings_of(ClusterOptions).items()
            if key not in SECTIONS and "expert" not in setting.metadata
        ],
    )


def _passed_on(option: Setting) -> str:
    services, key = option.metadata.get("passed_to", ((), ""))
    readers = "all" if len(services) == len(CONFIGS) else ", ".join(services)
    return f"`{key}` ({readers})" if services else ""


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    marks = ["---"] * len(columns)
    cells = [columns, marks, *([cell.replace("|", r"\|") for cell in line] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def outdated(root: Path) -> list[str]:
    """Pages below `root` that are missing or out of date."""
    return [
        name
        for name, make in PAGES.items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != make()
    ]


def write(root: Path) -> None:
    """Write all pages below `root`."""
    for name, make in PAGES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")


def main() -> int:
    """Write the pages, or with `--check` compare them; returns 1 if they differ."""
    parser = argparse.ArgumentParser(
        description="Generate the pages of docs/ that derive from the code."
    )
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check_only = parser.parse_args().check
    changed = outdated(ROOT)
    if not check_only:
        write(ROOT)
        print(f"{len(changed)} of {len(PAGES)} pages changed")
        return 0
    for name in changed:
        print(f"{name} is out of date: run `make gen` and commit it.")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
