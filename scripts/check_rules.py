"""Check Prometheus' configuration, the alert rules and their cases with Prometheus' own tool.

Needs promtool: from PATH, else from the next Debian release, which `--fetch` unpacks into the cache
folder. Without it nothing is checked, and the exit status is 77, or 0 with `--if-possible`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tideserve.cli.cache import cache_root  # noqa: E402

PROMETHEUS = ROOT / "deploy" / "observability" / "prometheus"
RULES, CASES = PROMETHEUS / "rules.yaml", PROMETHEUS / "rules_test.yaml"
PACKAGES = ("prometheus/trixie", "promtool/trixie")
FETCH_TIMEOUT_S = 900
CHECK_TIMEOUT_S = 120
UNAVAILABLE = 77


def tools() -> Path:
    """Folder of the unpacked packages."""
    return cache_root() / "prometheus-tools"


def find(tool: str) -> Path | None:
    """Path of `prometheus` or `promtool`; None if neither on PATH nor in the cache."""
    unpacked = tools() / "usr" / "bin" / tool
    if os.access(unpacked, os.X_OK):
        return unpacked
    on_path = shutil.which(tool)
    return Path(on_path) if on_path else None


def fetch() -> str | None:
    """Unpack the packages if missing; returns the error, None on success."""
    command = [str(ROOT / "scripts" / "debian_tools.sh"), str(tools()), *PACKAGES]
    tools().parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=FETCH_TIMEOUT_S
    )
    return None if done.returncode == 0 else done.stderr.strip() or "no error output"


def alerts(rules: Path = RULES) -> set[str]:
    """Names of all alerts."""
    groups = yaml.safe_load(rules.read_text())["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"]}


def untested(rules: Path = RULES, cases: Path = CASES) -> list[str]:
    """Alerts without a case in which they fire, or without a case in which they do not."""
    kinds: dict[str, set[bool]] = {name: set() for name in alerts(rules)}
    for case in yaml.safe_load(cases.read_text())["tests"]:
        for test in case["alert_rule_test"]:
            kinds.setdefault(test["alertname"], set()).add(bool(test["exp_alerts"]))
    return sorted(name for name, outcomes in kinds.items() if outcomes != {True, False})


def main() -> int:
    """Returns 0 on success, 1 if a check fails, 77 without the tool."""
    parser = argparse.ArgumentParser(description="Check Prometheus' configuration and rules.")
    parser.add_argument("--fetch", action="store_true", help="unpack promtool if it is missing")
    parser.add_argument("--if-possible", action="store_true", help="exit with 0 without promtool")
    arguments = parser.parse_args()
    # This check needs no promtool, so it always runs.
    for name in (missing := untested()):
        print(f"{name} lacks a case in which it fires or a case in which it does not")
    reason = fetch() if arguments.fetch and find("promtool") is None else None
    promtool = find("promtool")
    if promtool is None:
        print(f"promtool is missing ({reason or 'run with --fetch'}), so rules are not checked")
        return 1 if missing else 0 if arguments.if_possible else UNAVAILABLE
    configuration = str(PROMETHEUS / "prometheus.yaml")
    codes = [
        subprocess.run([promtool, *command], check=False, timeout=CHECK_TIMEOUT_S).returncode
        for command in (
            ["check", "config", "--syntax-only", configuration],
            ["check", "rules", str(RULES)],
            ["test", "rules", str(CASES)],
        )
    ]
    return 1 if missing or any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
