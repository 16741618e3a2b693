"""Version of the installed packages."""

from importlib.metadata import PackageNotFoundError, version

SOURCE = "from its source folder"
"""Version text if the packages are not installed."""


def installed_version() -> str:
    """The version of the installed packages."""
    try:
        return version("tideserve")
    except PackageNotFoundError:
        return SOURCE
