"""Requests of browsers from another origin."""

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.common.errors import ConfigError
from services.gateway.http.cors import origins_of, with_cors
from services.gateway.http.request_middleware import RequestMiddleware
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_recorder import RequestRecorder
from tests.support.asgi import answer_ok

KEY, PAGE = "k" * 20, "https://app.example"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def client(origins: str) -> httpx.AsyncClient:
    recorder = RequestRecorder(Metrics(("m",), CollectorRegistry()), None)
    app = with_cors(RequestMiddleware(answer_ok, KeyRing(KEY), recorder), origins_of(origins))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [("", None), ("https://other.example", None), (f"http://a:3000, {PAGE}", PAGE), ("*", "*")],
)
async def test_preflight_requests_need_no_key(origins: str, allowed: str | None) -> None:
    async with client(origins) as http:
        asked = await http.options("/v1/completions", headers=PREFLIGHT | {"origin": PAGE})
        refused = await http.post("/v1/completions", headers={"origin": PAGE})
        served = await http.post(
            "/v1/completions", headers={"origin": PAGE, "authorization": f"Bearer {KEY}"}
        )
    assert (asked.status_code == 200) is (allowed is not None)
    assert (refused.status_code, served.status_code) == (401, 200)
    for response in (asked, refused, served):
        assert response.headers.get("access-control-allow-origin") == allowed
        assert "access-control-allow-credentials" not in response.headers
    if allowed is not None:
        assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
        exposed = refused.headers["access-control-expose-headers"]
        assert "x-ratelimit-remaining-tokens" in exposed and "retry-after" in exposed


async def test_only_preflight_requests_pass_without_a_key() -> None:
    async with client("*") as http:
        assert (await http.options("/v1/completions")).status_code == 401
        assert (await http.options("/v1/completions", headers={"origin": PAGE})).status_code == 401


@pytest.mark.parametrize(
    "wrong", ["app.example", "https://app.example/", "https://*.example", "null", "file://x"]
)
def test_invalid_origins_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin"):
        origins_of(f"{PAGE},{wrong}")
