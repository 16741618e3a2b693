from pathlib import Path

from tideserve.cli.cache import TAG_NAME, cache_root, create_cache


def test_an_explicit_folder_takes_precedence() -> None:
    environ = {"TIDESERVE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}
    assert cache_root(environ) == Path("/a")


def test_empty_variables_count_as_unset() -> None:
    environ = {"TIDESERVE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}
    assert cache_root(environ) == Path("/c/.cache/tideserve")


def test_the_shared_cache_folder_comes_before_home() -> None:
    assert cache_root({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/tideserve")


def test_the_home_of_the_account_is_used_without_a_variable() -> None:
    assert cache_root({}).parts[-2:] == (".cache", "tideserve")


def test_a_new_cache_folder_is_tagged(tmp_path: Path) -> None:
    create_cache(tmp_path / "deep" / "cache")
    assert (tmp_path / "deep" / "cache" / TAG_NAME).read_text().startswith("Signature: ")


def test_a_folder_with_other_content_is_not_offered_for_deletion(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").touch()
    create_cache(tmp_path)
    assert not (tmp_path / TAG_NAME).exists()
