"""Which release this is."""

from importlib.metadata import PackageNotFoundError, version

SOURCE = "from its source folder"
"""In place of a version where the packages are not installed."""


def installed_version() -> str:
    """The version of the installed packages."""
    try:
        return version("tideserve")
    except PackageNotFoundError:
        return SOURCE
