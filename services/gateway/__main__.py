"""`python -m services.gateway [--config FILE]`, or `tideserve-gateway`."""

from services.common import lifecycle
from services.common.allocator import limit_arenas
from services.gateway.app import serve
from services.gateway.config import GatewayConfig


def main() -> None:
    """Serve until SIGTERM."""
    limit_arenas()
    lifecycle.main("gateway", GatewayConfig, serve)


if __name__ == "__main__":
    main()
