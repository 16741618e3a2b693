"""Where the admin port of a cluster is: given, or in the folder of a cluster on this machine."""

from pathlib import Path
from urllib.parse import urlsplit

from tideserve.cli.cluster_folder import ClusterFolder, default_folder
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError

REMEDY = (
    "give the admin port of its gateway with --admin-url or TIDESERVE_ADMIN_URL, or the folder of a"
    " cluster on this machine with --cluster-dir"
)


def find_admin_url(given: str | None, url: str, cluster_dir: Path | None) -> str:
    """The admin port: `given`, or that of the cluster on this machine whose gateway is at `url`.

    Raises:
        CommandError: if no such cluster runs here, or it has no admin port.
    """
    if given:
        return given
    folder = ClusterFolder(cluster_dir or default_folder(_port_of(url)))
    state = folder.read_state()
    if state is None or (cluster_dir is None and state.get("url") != url.rstrip("/")):
        raise CommandError(
            f"no cluster with the gateway {url} runs from {folder.root}; start one with"
            f" `tideserve up`, or {REMEDY}",
            EXIT_UNUSABLE,
        )
    admin_url = state.get("admin_url")
    if not admin_url:
        raise CommandError(
            f"the cluster in {folder.root} has no admin port; start it again with another"
            " 'admin_port' in the section 'gateway' of its --config",
            EXIT_UNUSABLE,
        )
    return str(admin_url)


def _port_of(url: str) -> int:
    try:
        port = urlsplit(url if "://" in url else f"http://{url}").port
    except ValueError:
        port = None
    if port is None:
        raise CommandError(f"'{url}' names no port of a cluster here; {REMEDY}", EXIT_UNUSABLE)
    return port
