"""`python -m services.gateway --config FILE.yaml`."""

from services.common import lifecycle
from services.gateway.app import serve
from services.gateway.config import Config

if __name__ == "__main__":
    lifecycle.main("gateway", Config, serve)
