"""The scenario `drop`: failing probes are reported, figures become rows."""

from pathlib import Path

import pytest

from benchmarks.probes.probe import Probe
from benchmarks.scenarios.drop import measure, rows

MODULE = """
import json, sys
if sys.argv[1] == "fail":
    sys.exit("first\\nno UCX here")
print(json.dumps({"said": sys.argv[1]}))
"""


def test_a_failed_probe_does_not_hide_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe_for_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wanted = [Probe(name, "measuring", "probe_for_test", (name,)) for name in ("fail", "good")]
    result = measure(wanted, lambda line: None)
    assert result["good"] == {"said": "good"}
    assert result["unavailable"] == {"fail": "measuring ended with 1: no UCX here"}
    assert rows(result) == []
