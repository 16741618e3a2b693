"""The digest of an adapter's files."""

from pathlib import Path

import pytest

from services.common.adapter_files import (
    CONFIG,
    FILES,
    WEIGHTS,
    AdapterUnreadable,
    CopyFailed,
    adapter_digest,
    folder_below,
)


def write(folder: Path, config: bytes = b"{}", weights: bytes = b"w") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_bytes(config)
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def test_the_digest_depends_on_both_files_only(tmp_path: Path) -> None:
    contents = [(b"{}", b"w"), (b"{ }", b"w"), (b"{}", b"w2"), (b"{}w", b""), (b"", b"{}w")]
    digests = [adapter_digest(write(tmp_path / "a", *content)) for content in contents]
    assert len(set(digests)) == len(contents)
    (write(tmp_path / "b") / "README.md").write_text("text")
    assert adapter_digest(tmp_path / "b") == digests[0]


def test_the_copy_has_the_bytes_that_were_read(tmp_path: Path) -> None:
    source, copy = write(tmp_path / "a", weights=b"w" * (2**20 + 1)), tmp_path / "copy"
    copy.mkdir()
    assert adapter_digest(source, copy) == adapter_digest(copy)
    assert sorted(path.name for path in copy.iterdir()) == [CONFIG, WEIGHTS]


def test_a_copy_fails_on_a_full_disk(tmp_path: Path) -> None:
    source, copy = write(tmp_path / "a"), tmp_path / "copy"
    copy.mkdir()
    (copy / WEIGHTS).symlink_to("/dev/full")
    with pytest.raises(CopyFailed, match="No space left on device; free space"):
        adapter_digest(source, copy)


@pytest.mark.parametrize("wrong", ["missing", "folder", "large"])
def test_unusable_files_are_refused(tmp_path: Path, wrong: str) -> None:
    folder = write(tmp_path / "a")
    if wrong == "missing":
        (folder / WEIGHTS).unlink()
    elif wrong == "folder":
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).mkdir()
    else:
        (folder / CONFIG).write_bytes(b" " * (2**20 + 1))
    with pytest.raises(AdapterUnreadable, match=r"cannot be read: .*write the adapter in peft"):
        adapter_digest(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_link_outside_the_roots_is_refused(tmp_path: Path, name: str) -> None:
    roots = [tmp_path / "roots"]
    roots[0].mkdir()
    folder, outside = write(roots[0] / "a"), write(tmp_path / "outside")
    assert folder_below(str(folder), roots) == folder.resolve()
    (folder / name).unlink()
    (folder / name).symlink_to(outside / name)
    with pytest.raises(AdapterUnreadable, match=f"{name} in .* is a link .*; copy the file there"):
        folder_below(str(folder), roots)
    # As in a cache whose files link to blobs of the same root.
    (outside / name).rename(roots[0] / "blob")
    (folder / name).unlink()
    (folder / name).symlink_to(roots[0] / "blob")
    assert folder_below(str(folder), roots) == folder.resolve()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("/etc", "is not below any of 'adapter_roots'; move it there"),
        ("a", "must be an absolute path"),
        ("/a\0", "cannot be resolved: .*; correct its path"),
        ("{root}/../outside", "is not below any"),
        ("{root}/link", "is not below any"),
    ],
)
def test_folders_outside_the_roots_are_refused(tmp_path: Path, source: str, text: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(write(tmp_path / "outside"))
    with pytest.raises(AdapterUnreadable, match=text):
        folder_below(source.format(root=root), [root])
