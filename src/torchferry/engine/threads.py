"""Starting threads."""

import threading

from torchferry.errors import StateError


def start(thread: threading.Thread) -> None:
    """Start a thread; raises StateError if the system allows no more."""
    try:
        thread.start()
    except RuntimeError as error:
        if "can't start" not in str(error):  # Ctrl-C, at a moment that Python does not handle well
            raise
        limits = "check the limits of processes (ulimit -u, the pids cgroup) and of memory"
        raise StateError(f"a thread can't be started: {error}; {limits}") from None
