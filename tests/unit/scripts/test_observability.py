"""Alerts, dashboards and runbook name only existing things, and each alert has its page."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import check_rules
import pytest
import typer
import yaml
from metrics_reference import reference

from services.common.setting import settings_of
from tideserve.cli.cluster_options import CONFIGS, ClusterOptions
from tideserve.cli.commands.main import app

ROOT = Path(__file__).resolve().parents[3]
RUNBOOK = ROOT / "docs" / "runbook"
RULES = yaml.safe_load(check_rules.RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in RULES for rule in group["rules"]}
BOARDS = sorted((ROOT / "deploy" / "observability" / "grafana" / "dashboards").glob("*.json"))
SECTIONS = ["## Meaning", "## Impact", "## Diagnosis", "## Remedy"]
# Metrics of Prometheus and etcd themselves.
FOREIGN = re.compile(r"up|etcd_(mvcc|server|disk)_\w+")
METRIC = re.compile(r"(?<![\w\"'])((?:vllm:|tideserve_|process_|etcd_)\w+|up(?=\{))")
ETCDCTL = {"endpoint", "compact", "defrag", "alarm", "get"}
PROGRAMS = {"tideserve", "kubectl", "etcdctl", "curl", "top"}
KUBECTL = {"logs", "describe", "scale", "delete", "get", "port-forward"}


def commands_in(page: str) -> list[str]:
    """Commands on a page: fenced lines, and quoted text that starts with a program."""
    fenced = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()]
    quoted = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    return lines + [" ".join(text.split()) for text in quoted if text.split()[0] in PROGRAMS]


def missing_of(command: str) -> str | None:
    """The unknown part of a command, None if all of it exists."""
    program, *arguments = command.split()
    if program not in PROGRAMS:
        return program
    known = {
        "tideserve": set(typer.main.get_command(app).commands),  # type: ignore[attr-defined]
        "etcdctl": ETCDCTL,
        "kubectl": KUBECTL,
    }
    if arguments and program in known and arguments[0] not in known[program]:
        return arguments[0]
    manifests = "".join(path.read_text() for path in (ROOT / "deploy" / "base").glob("*.yaml"))
    for name in re.findall(r"deployment/([\w-]+)", command):
        if not re.search(rf"kind: Deployment\nmetadata:\n  name: {name}\n", manifests):
            return name
    return None


def queries(board: Path) -> list[str]:
    """The queries of a board's panels."""
    panels = json.loads(board.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def names_in(expression: str) -> set[str]:
    """The metrics of a query."""
    return set(METRIC.findall(re.sub(r'"[^"]*"', '""', expression)))


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_its_page(name: str) -> None:
    path = ROOT / ALERTS[name]["annotations"]["runbook_url"]
    assert path == RUNBOOK / f"{name}.md"
    text = path.read_text()
    assert text.startswith(f"# {name}\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    assert ALERTS[name]["annotations"]["summary"]
    assert ALERTS[name]["labels"]["severity"] in {"info", "warning", "critical"}
    assert f"({name}.md)" in (RUNBOOK / "README.md").read_text()


def test_there_is_no_page_without_an_alert() -> None:
    assert {path.stem for path in RUNBOOK.glob("*.md")} == {*ALERTS, "README"}


@pytest.mark.parametrize("path", sorted(RUNBOOK.glob("*.md")), ids=lambda path: path.stem)
def test_pages_name_only_existing_metrics_and_commands(path: Path) -> None:
    text = path.read_text()
    for command in commands_in(text):
        assert missing_of(command) is None, command
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / link).is_file(), link
    keys = {key for config in (*CONFIGS.values(), ClusterOptions) for key in settings_of(config)}
    known = keys | sample_names()
    for word in re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:: \w+)?`", text):
        assert word in known or word in codes() or FOREIGN.fullmatch(word), word


def sample_names() -> set[str]:
    """The names that a query may use."""
    names = set()
    for entry in (
        sample for samples_of_metric in reference().values() for sample in samples_of_metric
    ):
        suffixes = ("_bucket", "_count", "_sum") if entry.kind == "histogram" else ("",)
        names |= {entry.name + suffix for suffix in suffixes}
    return names


def codes() -> set[str]:
    """Values of the labels `code` and `reason`."""
    return set(
        re.findall(r'code = "(\w+)"', (ROOT / "services/gateway/vocabulary/errors.py").read_text())
    )


def test_an_unknown_command_is_reported() -> None:
    assert missing_of("tideserve statsu") == "statsu"
    assert missing_of("kubectl scale deployment/worker --replicas=4") == "worker"
    assert missing_of("tidesrve status") == "tidesrve"
    assert missing_of("kubectl scale deployment/tideserve-worker --replicas=4") is None


def test_alerts_query_existing_metrics() -> None:
    known = sample_names()
    for name, rule in ALERTS.items():
        asked = names_in(rule["expr"])
        assert asked, name
        assert {name for name in asked - known if not FOREIGN.fullmatch(name)} == set(), name


def test_the_autoscaler_adds_no_workers_for_batch_work() -> None:
    path = ROOT / "deploy" / "components" / "keda" / "scaled_object.yaml"
    triggers = yaml.safe_load(path.read_text())["spec"]["triggers"]
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in triggers}
    assert all(names_in(query) <= sample_names() for query in queries.values())
    assert 'class_queued_requests{class!="batch"}' in queries["queue"]
    refusals = 'admission_rejections_total{class=~"interactive|standard",reason=~"'
    assert refusals + "queue_full|too_late|expired" in queries["queue"]
    assert "tideserve_worker_kv_blocks_batch" in queries["cache"]


def test_the_autoscaler_adds_workers_before_merges_are_exhausted() -> None:
    path = ROOT / "deploy" / "components" / "keda" / "scaled_object.yaml"
    triggers = yaml.safe_load(path.read_text())["spec"]["triggers"]
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in triggers}
    # KEDA polls less often than a trend may last.
    assert "max_over_time(tideserve_memmgr_demand_rising[1m])" in queries["rising"]


def test_every_alert_has_a_firing_and_a_silent_case(
    tmp_path: Path,
) -> None:
    assert check_rules.untested() == []
    cases: dict[str, Any] = yaml.safe_load(check_rules.CASES.read_text())
    first = next(iter(ALERTS))
    cases["tests"] = [
        case for case in cases["tests"] if not case["name"].startswith(f"{first} fires")
    ]
    fewer = tmp_path / "fewer.yaml"
    fewer.write_text(yaml.safe_dump(cases))
    assert check_rules.untested(cases=fewer) == [first]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_query_existing_metrics(path: Path) -> None:
    known = sample_names()
    for query in queries(path):
        asked = names_in(query)
        assert asked and asked <= known, (query, asked - known)


def test_queries_of_class_metrics_name_their_classes() -> None:
    """A sum over all would show the times of batch work, which no client waits for."""
    classed = re.compile(
        r"vllm:(time_to_first_token|inter_token_latency|admission_rejections)"
        r"|tideserve_(gateway_slo|scheduler_class|scheduler_oldest)_"
    )
    checked = 0
    asked = [query for path in BOARDS for query in queries(path)]
    for query in [*asked, *(rule["expr"] for rule in ALERTS.values())]:
        if classed.search(query):
            checked += 1
            assert re.search(r"by \([^)]*\bclass\b[^)]*\)", query) or 'class!="batch"' in query
    assert checked > 10


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap_and_queries_use_defined_variables(path: Path) -> None:
    board = json.loads(path.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in board["panels"]):
        xs, ys = (range(place[at], place[at] + place[size]) for at, size in ("xw", "yh"))
        cells = set(itertools.product(xs, ys))
        assert not cells & taken and xs.stop <= 24
        taken |= cells
    defined = {variable["name"] for variable in board["templating"]["list"]}
    used = {name for query in queries(path) for name in re.findall(r"\$\{?(\w+)", query)}
    assert used - {"__rate_interval"} <= defined
