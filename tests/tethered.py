"""Runs a command that ends with its parent, however that one ends: `python tethered.py PARENT SIGNAL USER COMMAND...`.

USER is a name, or empty for the present one. The process is the command's own: its id, its signals and its exit status
are as without this.
"""

import ctypes
import os
import pwd
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, user, *command = sys.argv[1:]
    if user:
        os.setuid(pwd.getpwnam(user).pw_uid)  # before the signal is chosen: it would be dropped
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))  # it outlives exec
        if os.getppid() != int(parent):  # gone before
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
