"""`tideserve move`: move running requests from a worker to another, with their KV."""

from urllib.parse import urlencode

from rich.console import Console
from rich.markup import escape

from tideserve.cli.client import AdminClient
from tideserve.cli.errors import CommandError

PATH = "/tideserve/v1/requests/move"
# The time limits of worker and memory manager are shorter.
TIMEOUT_S = 400.0


def move(
    url: str, key: str | None, source: str, target: str | None, requests_max: int | None
) -> None:
    """Move at most `requests_max` running requests (None: all that can) from worker `source`.

    They go to worker `target`, None: to the one with the most free KV.

    Raises:
        CommandError: if none can move; the message has the reason.
    """
    query = {"source": source, "target": target, "requests": requests_max}
    given = urlencode({name: value for name, value in query.items() if value is not None})
    with AdminClient(url, key, TIMEOUT_S) as client:
        answer = client.post_json(f"{PATH}?{given}", {})
    to, moved = escape(str(answer["target"])), int(answer["moved"])
    console = Console(highlight=False)
    noun = "request" if moved == 1 else "requests"
    console.print(f"[green]{moved}[/] {noun} moved from {escape(source)} to {to}", soft_wrap=True)
    if answer["kept"]:
        console.print(f"{answer['kept']} stay", soft_wrap=True)
    if not moved and answer["reason"]:
        raise CommandError(f"no request has moved: {answer['reason']}")
