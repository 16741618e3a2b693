import pytest

from services.common.errors import ConfigError
from services.common.etcd_url import Endpoints, parse_urls


@pytest.mark.parametrize(
    ("urls", "endpoints"),
    [
        ("a:1", Endpoints(("a:1",), tls=False)),
        ("http://a:1/", Endpoints(("a:1",), tls=False)),
        (" http://a:1 ,b:2", Endpoints(("a:1", "b:2"), tls=False)),
        ("https://a.b:1,https://[::1]:2/", Endpoints(("a.b:1", "[::1]:2"), tls=True)),
    ],
)
def test_url_forms_are_parsed(urls: str, endpoints: Endpoints) -> None:
    assert parse_urls(urls) == endpoints


@pytest.mark.parametrize(
    "url",
    ["", "a", "a:", "a:x", "a:0", "a:65536", "ftp://a:1", "http://a:1/x", "a:1?x", ":1", "a:1,"],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an etcd URL; write"):
        parse_urls(url)


def test_mixed_schemes_are_refused() -> None:
    with pytest.raises(ConfigError, match="some are not; use https"):
        parse_urls("https://a:1,http://b:1")


@pytest.mark.parametrize("url", ["https://me:secret@a:1", "https://me:secret@a", "me:secret@a:1"])
def test_errors_do_not_contain_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match="'etcd_password'") as raised:
        parse_urls(url)
    assert "secret" not in str(raised.value)
