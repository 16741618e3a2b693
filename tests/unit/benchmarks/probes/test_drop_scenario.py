"""The scenario `drop`: failing probes are reported, figures become rows."""

from pathlib import Path

import pytest

from benchmarks.probes.probe import Probe
from benchmarks.scenarios.drop import LAYOUT_GIB_MAX, measure, probes, rows
from benchmarks.systems.system import Deployment

MODULE = """
import json, sys
if sys.argv[1] == "fail":
    sys.exit("first\\nno UCX here")
print(json.dumps({"said": sys.argv[1]}))
"""


def drop_round(prepared: bool, elapsed_us: float) -> dict[str, object]:
    dropped = {"elapsed_us": elapsed_us, "cpu_us": 500.0, "dropped_bytes": 64 << 20}
    return {
        "prepared": prepared,
        "drop": {**dropped, "blocks": [100, 330]},
        "first_touch_ms_per_gib": {"elapsed": 200.0 if prepared else 900.0},
        "warm_touch_ms_per_gib": {"elapsed": 100.0},
        "restore": {"set_stage": {"elapsed_ms": 0.25}},
    }


def trips(p50_s: float, bulk: float) -> dict[str, float]:
    return {"p50_s": p50_s, "p99_s": 2 * p50_s, "bulk_bytes_per_s": bulk}


def test_a_probe_that_fails_does_not_hide_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe_for_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wanted = [Probe(name, "measuring", "probe_for_test", (name,)) for name in ("fail", "good")]
    found = measure(wanted, lambda line: None)
    assert found["good"] == {"said": "good"}
    assert found["unavailable"] == {"fail": "measuring ended with 1: no UCX here"}
    assert rows(found) == []


def test_figures_become_rows() -> None:
    lanes: dict[str, object] = {
        "idle": trips(0.0002, 0.0),
        "coordinated": trips(0.0003, 50 << 20),
        "uncoordinated": trips(0.004, 90 << 20),
    }
    speeds = {"bulk": 150, "plain": 200, "plain_cached": 1600}
    lanes |= {f"{name}_bytes_per_s": float(speed << 20) for name, speed in speeds.items()}
    memory = {"rounds": [drop_round(False, 900.0), drop_round(True, 1100.0)]}
    layout = {"rounds": [drop_round(False, 3000.0)]}
    shown = dict(rows({"memory": memory, "layout": layout, "lanes": lanes}))
    expected = {
        "pause of a drop, at once": "0.90 ms (0.50 ms of processor time)",
        "pause of a drop, prepared": "1.10 ms (0.50 ms of processor time)",
        "48 layers: pause of a drop, at once": "3.00 ms (0.50 ms of processor time)",
        "KV blocks before and after": "100 → 330",
        "writing of 1 GiB of new KV, at once": "900 ms, 100 ms the second time",
        "writing of 1 GiB of new KV, prepared": "200 ms, 100 ms the second time",
        "activation and back, alone": "p50 0.20 ms, p99 0.40 ms",
        "bulk with nothing beside it": "150 MiB/s, 75% of what UCX alone carries",
        "UCX alone": "200 MiB/s from slab to slab, 1,600 in the caches",
    }
    assert {name: shown[name] for name in expected} == expected
    assert shown["activation and back, beside bulk that does not"].endswith("90 MiB/s beside it")


def test_the_programs_get_what_a_person_chose(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "m", tmp_path, 2, 512 << 20, dtype="float32")
    memory, layout, lanes, tcp = probes(deployment, quick=True)
    assert memory.arguments[:6] == (
        *("--model-dir", str(tmp_path), "--dtype", "float32"),
        *("--memory-gib", "0.5"),
    )
    assert layout.arguments[0] == "--layout" and 1 <= int(layout.arguments[1]) <= LAYOUT_GIB_MAX
    assert lanes.arguments == ("--trips", "300")
    assert tcp.arguments == ("--trips", "300", "--transports", "tcp")
