"""Workers in front of upstream servers in `tideserve status`."""

from tideserve.cli.status import foreign_engines, trouble_lines
from tideserve.cli.upstream_status import TEXT_ONLY, outage_lines, upstream_lines

IDS = "http://a:1: m by vllm 0.32, output as token ids"
TEXT = "http://b:1: m by openai, output as text, prompts too"
STATUS = {
    "workers": [
        {"id": "worker-0", "engine": "openai", "upstream": IDS, "outage": ""},
        {"id": "worker-1", "engine": "openai", "upstream": TEXT, "outage": "it is gone"},
        {"id": "worker-2", "engine": "vllm", "upstream": "", "outage": ""},
        {"id": "worker-3", "engine": "tideserve"},  # as an older gateway shows it
    ]
}


def test_each_server_is_listed_with_its_limitations() -> None:
    assert upstream_lines(STATUS) == [
        f"worker-0 is in front of {IDS}",
        f"worker-1 is in front of {TEXT}{TEXT_ONLY}",
    ]
    assert foreign_engines(STATUS) == {"vllm": "worker-2"}


def test_a_lost_server_is_a_warning() -> None:
    assert outage_lines(STATUS) == ["worker-1 gets no requests: it is gone"]
    assert outage_lines(STATUS)[0] in trouble_lines(STATUS)
