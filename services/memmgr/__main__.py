"""`python -m services.memmgr --config FILE`."""

from services.common.lifecycle import main
from services.memmgr.app import serve
from services.memmgr.config import Config

if __name__ == "__main__":
    main("memmgr", Config, serve)
