"""`tideserve drop` and `tideserve restore`: change groups by hand and wait for the end."""

from collections.abc import Sequence
from urllib.parse import urlencode

from rich.console import Console
from rich.markup import escape

from tideserve.cli.client import AdminClient
from tideserve.cli.errors import CommandError

MERGE_PATH = "/tideserve/v1/groups/merge"
SPLIT_PATH = "/tideserve/v1/groups/split"
# A step may take as long as members need to get ready; the memory manager ends the wait itself.
STEP_TIMEOUT_S = 900.0


def drop(url: str, key: str | None, groups: Sequence[str]) -> None:
    """Merge `groups`, all if empty, so that each member drops layers. Raises CommandError."""
    _change(url, key, MERGE_PATH, groups)


def restore(url: str, key: str | None, group: str | None) -> None:
    """Split `group`, the only merged one if None, so that each member has all layers again.

    Raises:
        CommandError: if it is refused or fails; its sentence says why.
    """
    _change(url, key, SPLIT_PATH, [group] if group else [])


def _change(url: str, key: str | None, path: str, groups: Sequence[str]) -> None:
    query = urlencode([("group", group) for group in groups])
    console = Console(highlight=False)
    phase, message = "", ""
    with AdminClient(url, key, STEP_TIMEOUT_S) as client:
        for step in client.post_events(f"{path}?{query}" if query else path, {}):
            phase, message = str(step.get("phase", "")), str(step.get("message", ""))
            if phase != "failed":
                style = "green" if phase == "stable" else "dim"
                console.print(f"[{style}]{escape(phase)}[/]: {escape(message)}", soft_wrap=True)
    if phase != "stable":
        raise CommandError(message or f"{url} broke the answer off; see `tideserve status`")
