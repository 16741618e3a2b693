"""Files that a command writes at its end."""

from pathlib import Path

from tideserve.cli.errors import EXIT_UNUSABLE, CommandError


def check_writable(path: Path | None) -> None:
    """Make sure, before the work, that a file can be written. Raises CommandError."""
    if path is None:
        return
    existed = path.exists()
    try:
        path.touch()
        if not existed:
            path.unlink()
    except OSError as error:
        raise CommandError(f"cannot write to {path}: {error.strerror}", EXIT_UNUSABLE) from error
