"""Run a program that dies with its parent: `python with_parent.py PARENT_PID PROGRAM …`.

For programs that cannot ask for it themselves (etcd). Standard library only and run as a file, so
that it starts in the time of a bare interpreter. The parent must have started it from its main
thread, which has to live as long as the parent does: the kernel looks at the thread.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGKILL at the parent's death, then become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the kernel was asked.
    if os.getppid() == parent:
        os.execv(program[0], program)


if __name__ == "__main__":
    main()
