"""A hostile tokenizer or template is refused at the start, and ends only its trial process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.gateway.model.served_model import load_model
from services.gateway.model.trial import CPU_MAX_S, cpu_max_s, try_model
from tests.support.byte_tokenizer import byte_tokenizer, write_model_folder


def grown(text: str, times: int, steps: int) -> dict[str, Any]:
    """A normalizer that multiplies the length of `text` in each of `steps`."""
    step = {"type": "Replace", "pattern": {"String": text}, "content": text * times}
    return {"normalizer": {"type": "Sequence", "normalizers": [step] * steps}}


def searched(expression: str) -> dict[str, Any]:
    """A pre-tokenizer that splits at matches of a regular expression."""
    split = {"pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Split", **split}}


def token(content: str) -> dict[str, Any]:
    """The setting of an added token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 300, "content": content, "special": True, **flags}


REPLACING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**5}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (grown("a", 100, 6), "takes too much memory, or crashes"),
        (grown("ꙮ", 100, 6), "takes too much memory, or crashes"),
        (grown("a", 40, 1), "too many tokens"),
        (searched("(a+)+$|(a*)*b"), "retry-limit"),
        (searched("(ꙮ+)+$|(ꙮ*)*b"), "retry-limit"),
        ({"model": {"type": "Nothing"}}, "is not a usable tokenizer"),
        ({"added_tokens": [token("z" * 10_000)]}, "more than 8192 characters"),
        ({"decoder": REPLACING}, "too long"),
    ],
    ids=["bomb", "rare-bomb", "growth", "regex", "rare-regex", "model", "token", "decoder"],
)  # fmt: skip
def test_a_hostile_tokenizer_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = write_model_folder(tmp_path)
    settings = json.loads(byte_tokenizer().to_str())
    (folder / "tokenizer.json").write_text(json.dumps(settings | changes))

    with pytest.raises(ConfigError, match=reason) as caught:
        load_model("m", folder)
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 200_000 + "]" * 200_000, "{", "[]", ""])
def test_an_invalid_tokenizer_file_is_refused(tmp_path: Path, text: str) -> None:
    (write_model_folder(tmp_path) / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a usable tokenizer"):
        load_model("m", tmp_path)


LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='aaaaaaaa') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, "the chat template of .* takes too long"),
        (DOUBLING, "the chat template of .* takes too much memory"),
        ("{{ 'x' * 3000000000 }}", "the chat template of .* takes too much memory"),
        ("{{ 'x'.ljust(4000000000) }}", "the chat template of .* takes too much memory"),
        ("{% if %}", "does not compile"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "does not compile"),
    ],
    ids=["loop", "doubling", "constant", "pad", "syntax", "nested"],
)
def test_a_hostile_template_is_refused(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model("m", write_model_folder(tmp_path, template=template))


def test_trial_reports_the_variables_of_a_template(tmp_path: Path) -> None:
    template = "{{ messages }}{% if tools %}{{ tools }}{% endif %}"
    assert try_model(write_model_folder(tmp_path, template=template)) == {"messages", "tools"}
    assert try_model(write_model_folder(tmp_path, template=None)) == set()
    refusing = "{{ raise_exception('needs tools') }}"
    assert try_model(write_model_folder(tmp_path, template=refusing)) == set()


def test_a_large_tokenizer_may_take_longer(tmp_path: Path) -> None:
    assert cpu_max_s(tmp_path) == CPU_MAX_S
    for size_mb, extra_s in ((9, 0), (20, 2), (105, 10)):
        with (tmp_path / "tokenizer.json").open("wb") as file:
            file.truncate(size_mb * 10**6)
        assert cpu_max_s(tmp_path) == CPU_MAX_S + extra_s


def test_hard_limits_of_the_process_are_unchanged(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))\n"
        "from services.gateway.model.trial import try_model\n"
        "print(*try_model(Path(sys.argv[1])))"
    )
    done = subprocess.run((sys.executable, "-c", code, folder), capture_output=True, check=True)
    assert b"messages" in done.stdout


def test_the_trial_has_no_keys_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDESERVE__API_KEYS", "secret")
    environment = tmp_path / "environment"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nenv > {environment}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    try_model(write_model_folder(tmp_path / "model"))

    assert "PATH=" in environment.read_text()
    assert "TIDESERVE" not in environment.read_text()
