"""Finds the admin port of a cluster: the given one, or that of a cluster on this machine."""

from pathlib import Path
from urllib.parse import urlsplit

from tideserve.cli.cache import cache_root
from tideserve.cli.cluster_folder import ClusterFolder, default_folder, running_urls
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
    return given or admin_url_of(find_folder(url, cluster_dir))


def admin_url_of(folder: ClusterFolder) -> str:
    """The admin port of the cluster that runs from a folder. Raises CommandError if it has none."""
    admin_url = (folder.read_state() or {}).get("admin_url")
    if not admin_url:
        raise CommandError(
            f"the cluster in {folder.root} has no admin port; start it again with another"
            " 'admin_port' in the section 'gateway' of its --config",
            EXIT_UNUSABLE,
        )
    return str(admin_url)


def find_folder(url: str, cluster_dir: Path | None) -> ClusterFolder:
    """The folder of the cluster on this machine whose gateway is at `url`, or `cluster_dir`.

    Raises:
        CommandError: if no such cluster runs here.
    """
    if cluster_dir is None and _port_of(url) is None:
        raise CommandError(f"'{url}' names no port of a cluster here; {REMEDY}", EXIT_UNUSABLE)
    folder = local_folder(url) if cluster_dir is None else ClusterFolder(cluster_dir)
    if folder is None or folder.read_state() is None:
        place = f"on this machine at {url} by the cache folder {cache_root()} (TIDESERVE_CACHE)"
        if cluster_dir is not None:
            place = f"from {cluster_dir}"
        raise CommandError(f"no cluster runs {place}; {_others()}, or {REMEDY}", EXIT_UNUSABLE)
    return folder


def local_folder(url: str) -> ClusterFolder | None:
    """The folder of the cluster on this machine whose gateway is at `url`, None if none is."""
    port = _port_of(url)
    if port is None:
        return None
    folder = ClusterFolder(default_folder(port))
    state = folder.read_state()
    if state is None or state.get("url") != _with_scheme(url).rstrip("/"):
        return None
    return folder


def _others() -> str:
    """The remedy: the URLs of the clusters that run, or how to start one."""
    urls = running_urls()
    if not urls:
        return "start one with `tideserve up`"
    if len(urls) == 1:
        return f"one runs at {urls[0]}: add --url {urls[0]}"
    return f"clusters run at {', '.join(urls)}: add --url with one of these"


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(_with_scheme(url)).port
    except ValueError:
        return None


def _with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"
