#!/bin/sh
# Find a recent enough Python and run setup.py with it.
# Usage: scripts/setup.sh serve|test|clean [options of setup.py]

# Another project's environment must not leak into ours.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

root=$(cd "$(dirname "$0")/.." && pwd) || exit 1

for python in python3 python3.13 python3.12 python3.11; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        # The parent is make: setup.py ends with it, however it ends.
        exec "$python" "$root/scripts/setup.py" --parent "$PPID" "$@"
    fi
done

echo "tideserve needs Python 3.11 or newer, and neither python3 nor python3.11 to 3.13 is one." >&2
echo "Install it (Debian and Ubuntu: apt-get install python3 python3-venv) and try again." >&2
exit 1
