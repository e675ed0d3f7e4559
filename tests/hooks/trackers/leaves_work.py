"""A client that keeps the process at its exit: a thread that Python joins, exit handlers, and a service process."""

import atexit
import subprocess
import sys
import threading
import time

FOREVER = 3600


def connect() -> None:
    """Leave all of these, and hang."""
    service = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"])
    atexit.register(service.wait)
    atexit.register(wait)
    threading.Thread(target=wait, daemon=False).start()
    wait()


def wait() -> None:
    """Wait for a server that does not answer."""
    time.sleep(FOREVER)
