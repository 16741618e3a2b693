"""Workers of different code have different builds."""

from pathlib import Path

from services.worker.app import code_digest


def test_the_build_digest_covers_files_and_names(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "other").mkdir()
    file = tmp_path / "core" / "a.py"
    seen = []
    for content in (b"1", b"2"):
        file.write_bytes(content)
        seen.append(code_digest(tmp_path, ["core"]))
    file.rename(file.with_name("b.py"))
    seen.append(code_digest(tmp_path, ["core"]))
    assert len(set(seen)) == len(seen)
    (tmp_path / "other" / "c.py").touch()
    (tmp_path / "core" / "b.pyc").touch()
    assert code_digest(tmp_path, ["core"]) == seen[-1]


def test_the_build_digest_of_this_tree_is_stable() -> None:
    assert code_digest() == code_digest()
    assert len(code_digest()) == 64
