"""Runs a program that dies with its parent: `python with_parent.py PARENT_PID PROGRAM …`.

For programs that cannot set a parent-death signal themselves (etcd). Uses the standard library
only, so that it starts as fast as a bare interpreter. The parent must start it from its main
thread, because the kernel sends the signal when that thread ends.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request SIGKILL at the parent's death, then exec the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the request: then no signal would ever come.
    if os.getppid() == parent:
        os.execv(program[0], program)


if __name__ == "__main__":
    main()
