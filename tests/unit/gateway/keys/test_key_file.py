import json
import string
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.core.quota.limits import QuotaLimits
from services.gateway.keys.key_file import (
    KeyEntry,
    hash_of,
    new_key,
    parse_keys,
    read_keys,
)

HASH, OTHER = "a" * 64, "b" * 64


def text(*lines: object) -> bytes:
    return "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines).encode()


def refusal(*lines: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text(*lines), "keys")
    return str(caught.value)


def test_generated_keys_are_unique_and_well_formed() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    allowed = set(string.ascii_letters + string.digits)
    assert all(len(k) == 47 and k.startswith("tsk_") and set(k[4:]) <= allowed for k in keys)


def test_an_entry_round_trips() -> None:
    full = KeyEntry(
        owner="team/a",
        sha256=HASH,
        admin=True,
        models=("m", "n"),
        requests_per_minute=60,
        tokens_per_minute=1000,
        concurrent=4,
        created="2026-01-01T00:00:00Z",
    )
    plain = KeyEntry(owner="b", sha256=OTHER)
    assert parse_keys(text("# ours", full.line(), "", plain.line(), ""), "keys") == [full, plain]
    assert json.loads(plain.line()) == {"owner": "b", "sha256": OTHER}
    principal = full.principal()
    assert principal.limits == QuotaLimits(60, 1000, 4) and principal.admin
    assert principal.may_use("n") and not principal.may_use("o")
    assert plain.principal().may_use("anything") and not plain.principal().limits


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"sha256": HASH}, "'owner' is missing"),
        ({"owner": "a"}, "'sha256' is missing"),
        ({"owner": "a", "sha256": HASH, "rpm": 1}, "unknown configuration key 'rpm'"),
        ({"owner": "a", "sha256": HASH, "model": ["m"]}, "did you mean 'models'?"),
        ({"owner": "", "sha256": HASH}, "'owner' must be"),
        ({"owner": "a b", "sha256": HASH}, "'owner' must be"),
        ({"owner": "a", "sha256": "A" * 64}, "'sha256' must be"),
        ({"owner": "a", "sha256": HASH, "models": []}, "'models' must be"),
        ({"owner": "a", "sha256": HASH, "models": [1]}, "'models' must be"),
        ({"owner": "a", "sha256": HASH, "concurrent": 0}, "must be 1 to"),
        ({"owner": "a", "sha256": HASH, "concurrent": True}, "must be of type int"),
        ({"owner": "a", "sha256": HASH, "requests_per_minute": 1.5}, "must be of type int"),
        ({"owner": "a", "sha256": HASH, "admin": "yes"}, "must be of type bool"),
        (["owner"], "is not a JSON object"),
        ('{"owner": "a", "owner": "b"}', "with unique keys"),
        ("owner: a", "is not a JSON object"),
    ],
)
def test_an_invalid_line_is_named(line: object, message: str) -> None:
    error = refusal("# first", {"owner": "z", "sha256": OTHER}, line)
    assert message in error and "keys, line 3" in error


def test_error_messages_never_contain_a_key() -> None:
    key = new_key()
    for line in ({"owner": "a", "sha256": key}, f'{{"owner": "a", "sha256": "{key}"', key):
        assert key not in refusal(line)


def test_conflicting_lines_are_named() -> None:
    first = {"owner": "a", "sha256": HASH, "concurrent": 1}
    assert "line 1 and line 3" in refusal(first, "", first)
    error = refusal(first, {"owner": "a", "sha256": OTHER, "concurrent": 2})
    assert "different limits for 'a' in line 2 and line 1" in error


@pytest.mark.parametrize("mode", [0o660, 0o602])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text({"owner": "a", "sha256": hash_of("k")}))
    path.chmod(0o640)
    assert [entry.owner for entry in read_keys(path)] == ["a"]
    path.chmod(mode)
    with pytest.raises(ConfigError, match="writable by other users"):
        read_keys(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(path)
    path.write_bytes(b"\xff")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="UTF-8"):
        read_keys(path)
