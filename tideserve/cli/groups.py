"""`tideserve drop` and `tideserve restore`: merge and split groups by hand."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from rich.console import Console
from rich.markup import escape

from tideserve.cli.client import AdminClient
from tideserve.cli.errors import CommandError

MERGE_PATH = "/tideserve/v1/groups/merge"
SPLIT_PATH = "/tideserve/v1/groups/split"
# A step takes as long as its members need to prepare; the memory manager enforces the deadline.
STEP_TIMEOUT_S = 900.0


def drop(url: str, key: str | None, groups: Sequence[str]) -> None:
    """Merge `groups`, all if empty, so that each member drops layers. Raises CommandError."""
    _change(url, key, MERGE_PATH, groups, {})


def restore(url: str, key: str | None, group: str | None, parts: int | None = None) -> None:
    """Split `group` (None: the only merged group) into `parts` groups (None: into single workers).

    Raises:
        CommandError: if the split is refused or fails; the message has the reason.
    """
    number = {} if parts is None else {"parts": parts}
    _change(url, key, SPLIT_PATH, [group] if group else [], number)


def _change(
    url: str, key: str | None, path: str, groups: Sequence[str], more: Mapping[str, int]
) -> None:
    query = urlencode([*(("group", group) for group in groups), *more.items()])
    console = Console(highlight=False)
    phase, message = "", ""
    with AdminClient(url, key, STEP_TIMEOUT_S) as client:
        for step in client.post_events(f"{path}?{query}" if query else path, {}):
            phase, message = str(step.get("phase", "")), str(step.get("message", ""))
            if phase != "failed":
                style = "green" if phase == "stable" else "dim"
                console.print(f"[{style}]{escape(phase)}[/]: {escape(message)}", soft_wrap=True)
    if phase != "stable":
        raise CommandError(message or f"{url} closed the stream early; see `tideserve status`")
