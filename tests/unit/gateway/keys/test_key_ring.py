import asyncio
import logging
import os
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.gateway.keys import key_ring
from services.gateway.keys.key_file import KeyEntry, hash_of, read_keys
from services.gateway.keys.key_ring import KeyRing, KeySource
from services.gateway.keys.principal import ANYONE
from services.gateway.vocabulary.errors import Forbidden, Unauthorized
from tests.support.secret_volume import SecretVolume
from tests.support.waiting import eventually


def write(path: Path, **keys: str) -> None:
    """Replace the file by one with these keys by owner; upper-case owners are admins."""
    entries = [
        KeyEntry(owner=owner.lower(), sha256=hash_of(key), admin=owner.isupper())
        for owner, key in keys.items()
    ]
    new = path.with_suffix(".new")
    new.write_text("".join(entry.line() + "\n" for entry in entries))
    new.chmod(0o600)
    os.replace(new, path)


def refused(ring: KeyRing, authorization: str | None) -> bool:
    try:
        ring.principal(authorization)
    except Unauthorized:
        return True
    return False


def test_all_requests_pass_without_keys() -> None:
    ring = KeyRing()
    assert ring.principal(None) is ANYONE and ring.operator("Bearer x") is ANYONE
    assert not ring.key_required


def test_the_configured_key_is_accepted() -> None:
    ring = KeyRing(api_key="schlüssel")
    header = "Bearer schlüssel".encode().decode("latin-1")
    assert ring.principal(header).owner == ""
    wrong = [None, "", "Bearer", "Bearer ", "Bearer x", "schlüssel", "Basic schlüssel", "Bearer é"]
    assert all(refused(ring, key) for key in wrong)


def test_each_key_has_its_owner_and_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, alice="a-key", ROOT="root-key")
    ring = KeyRing("old-key", "admin-key", path)
    assert ring.principal("bearer a-key").owner == "alice"
    assert ring.principal("Bearer  root-key ").admin
    assert ring.principal("Bearer old-key").owner == ""
    # The admin port's own key opens nothing else.
    assert refused(ring, "Bearer admin-key")
    assert ring.operator("Bearer admin-key").admin and ring.operator("Bearer root-key").admin
    for clients in ("a-key", "old-key"):
        with pytest.raises(Forbidden):
            ring.operator(f"Bearer {clients}")
    with pytest.raises(Unauthorized):
        ring.operator("Bearer nobodys")
    assert ring.limits_by_owner() == {}


def test_a_file_closes_the_admin_port_to_those_without_admin_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, alice="a-key")
    with pytest.raises(Unauthorized):
        KeyRing(path=path).operator(None)


def test_an_empty_key_file_admits_no_request(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path)
    assert refused(KeyRing(path=path), None)


def test_an_invalid_key_file_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        KeyRing(path=tmp_path / "none")


def test_a_changed_file_is_reloaded_and_an_invalid_one_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    write(path, alice="one")
    source = KeySource(path)
    assert not source.poll()
    write(path, alice="one", bob="two")
    assert source.poll() and [entry.owner for entry in source.entries] == ["alice", "bob"]

    def broken() -> bool:
        before = list(source.entries)
        caplog.clear()
        changed = source.poll() or source.poll()
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        return not changed and source.failing and source.entries == before and len(errors) == 1

    path.write_text("no key\n")
    assert broken()
    path.unlink()
    assert broken()
    write(path, carol="three")
    assert source.poll() and not source.failing
    path.chmod(0o666)
    assert broken()
    path.chmod(0o600)
    # As it was when it was read.
    assert not source.poll() and not source.failing


def lines(**keys: str) -> dict[str, str]:
    """The files of a Secret with these keys by their owners."""
    entries = [KeyEntry(owner=owner, sha256=hash_of(key)) for owner, key in keys.items()]
    return {"keys.jsonl": "".join(entry.line() + "\n" for entry in entries)}


def test_a_kubernetes_secret_is_reloaded(tmp_path: Path) -> None:
    volume = SecretVolume(tmp_path / "keys", lines(alice="one"))
    source = KeySource(tmp_path / "keys" / "keys.jsonl")

    def owners() -> list[str]:
        return [entry.owner for entry in source.entries]

    # Often, as numbers of files come again when the former ones are deleted.
    for turn in range(20):
        # As long as the one before, and within a tick of the file system's clock.
        volume.update(lines(bobby=f"key {turn:02}"))
        assert source.poll() and owners() == ["bobby"], turn
        assert source.entries[0].sha256 == hash_of(f"key {turn:02}")
        assert not source.poll()
    volume.update({"keys.jsonl": "{}\n"})
    assert not source.poll() and source.failing and owners() == ["bobby"]
    volume.update({"others": ""})
    assert not source.poll() and source.failing and owners() == ["bobby"]
    volume.update(lines(carol="three"))
    assert source.poll() and not source.failing and owners() == ["carol"]


def test_a_secret_swapped_during_the_read_is_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys" / "keys.jsonl"
    volume = SecretVolume(path.parent, lines(alice="one"))
    source = KeySource(path)
    swaps = [lines(carol="three")]

    def swapped(name: Path) -> list[KeyEntry]:
        # The links are followed first, and what they lead to is gone then.
        target = name.resolve()
        if swaps:
            volume.update(swaps.pop())
        return read_keys(target)

    monkeypatch.setattr(key_ring, "read_keys", swapped)
    volume.update(lines(bob="two"))
    assert source.poll() and not source.failing
    assert [entry.owner for entry in source.entries] == ["carol"]


async def test_a_key_ring_watches_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.01)
    path = tmp_path / "keys"
    write(path, alice="old")
    ring = KeyRing(path=path)
    following = asyncio.create_task(ring.run())
    try:
        write(path, alice="new")
        await eventually(lambda: not refused(ring, "Bearer new"))
        assert refused(ring, "Bearer old")
    finally:
        following.cancel()


def test_the_digest_covers_the_active_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert KeyRing("settings").digest == 0
    write(path, alice="a-key", bob="b-key")
    source, ring = KeySource(path), KeyRing(path=path)
    first = source.digest
    assert ring.digest == int(first[:12], 16) > 0
    path.write_text("# in another order\n" + "\n".join(reversed(path.read_text().split("\n"))))
    assert KeySource(path).digest == first
    write(path, ALICE="a-key", bob="b-key")
    assert source.poll() and source.digest == KeySource(path).digest != first
    admins = source.digest
    path.write_text("no keys")
    assert not source.poll() and source.failing and source.digest == admins
