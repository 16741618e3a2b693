"""`models`: the tokenizers differ, and each missed bar is a problem."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scenarios.models import ONE, TWO, ModelRecord, judge, write_other_tokenizer
from benchmarks.systems.cores import child_cores, halves, pin
from services.gateway.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import write_model_folder

TEXT = "<|im_start|>Grüße, 12 apples"


def encode(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(TEXT, False, tokens_max=256)


def test_the_second_model_has_another_tokenizer_of_the_same_size(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    write_other_tokenizer(tmp_path / "second")
    first, second = (Tokenizer.load(tmp_path / name) for name in ("first", "second"))
    ids = encode(second)
    assert second.decode(ids, skip_special_tokens=False) == TEXT
    assert first.size == second.size and first.added_tokens == second.added_tokens
    # The special token keeps its id, which the configuration may name.
    same = [a == b for a, b in zip(encode(first), ids, strict=True)]
    assert same == [True] + [False] * (len(ids) - 1)


RECORD = ModelRecord(
    tokens_per_s={ONE: [96.0, 99.0, 90.0], TWO: [100.0, 100.0, 100.0]},
    alone_s={ONE: [[0.2] * 20] * 3, TWO: [[0.2] * 20] * 3},
    flooded_s={ONE: [[0.24] * 20] * 3, TWO: [[0.3] * 20] * 3},
    resident={ONE: 150, TWO: 200},
    private={ONE: 80, TWO: 100},
)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, []),
        ({"resident": {ONE: 152, TWO: 200}}, ["memory of the gateways, one over two is 0.76"]),
        (
            {"tokens_per_s": {ONE: [94.0, 99.0, 90.0], TWO: [100.0, 100.0, 100.0]}},
            ["tokens per second, one over two is 0.94"],
        ),
        (
            {"flooded_s": {ONE: [[0.26] * 20] * 3, TWO: [[0.24] * 20] * 3}},
            ["P99 TTFT, flooded over alone is 1.30"],
        ),
    ],
)
def test_bars(changes: dict[str, object], problems: list[str]) -> None:
    verdict = judge(replace(RECORD, **changes), "A100-40G-7B:4")  # type: ignore[arg-type]
    assert len(verdict.problems) == len(problems)
    for text, begin in zip(verdict.problems, problems, strict=True):
        assert text.startswith(begin)
    assert verdict.figures["gateway_private_ratio"] == 0.8
    assert verdict.figures["requests"] == 60


def test_a_child_runs_on_its_cores_only() -> None:
    first, second = halves()
    before = os.sched_getaffinity(0)
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with child_cores(second):
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) == sorted(second) and os.sched_getaffinity(0) == before
    with subprocess.Popen(["sleep", "60"]) as process:
        pin([process.pid, 2**22 + 1], first)
        assert os.sched_getaffinity(process.pid) == first
        process.kill()
