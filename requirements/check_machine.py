"""Say in a sentence what this machine lacks before anything is installed: `make setup` runs it.

It runs on whatever Python the user has, so it keeps to what Python 2.7 can read.
"""

import os
import shutil
import sys

NEWEST = (3, 14)
NEEDED_BYTES = 5 * 1024**3  # of packages, most of them PyTorch's and vLLM's


def problem():
    """Return a sentence, or None."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info < (3, 11) or sys.version_info[:2] > NEWEST:
        return (
            "Python 3.11 to 3.%d is needed, and %s is %s: `make PYTHON=/path/to/python3.12 ...` "
            "takes another one" % (NEWEST[1], sys.executable, version)
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return (
            "this Python cannot make virtual environments: install its venv package (on Debian "
            "and Ubuntu `apt install python%d.%d-venv`)" % sys.version_info[:2]
        )
    free = shutil.disk_usage(os.getcwd()).free
    if not os.path.exists(".venv/installed.stamp") and free < NEEDED_BYTES:
        return "the packages need some %d GB in %s, and %.1f GB are free: make room there" % (
            NEEDED_BYTES // 1024**3,
            os.getcwd(),
            free / 1024.0**3,
        )
    return None


if __name__ == "__main__":
    found = problem()
    if found:
        sys.exit("error: " + found)
