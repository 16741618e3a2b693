"""The `tideserve` command with fake services: `python -m tests.support.fake_up up …`."""

from tideserve.cli import up
from tideserve.cli.commands.main import main

if __name__ == "__main__":
    up.SERVICE_MODULES = dict.fromkeys(up.SERVICE_MODULES, "tests.support.fake_service")
    main()
