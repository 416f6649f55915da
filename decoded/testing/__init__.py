"""A harness for tests of what talks to the daemon: a real one, in a process of its own.

with DaemonProcess() as daemon, Client(daemon.endpoint, "engine-1") as client:
    client.submit(Submission("r1", "x1", [[1, 2]], 32, do_virtual=True))
    [outcome] = client.wait(timeout_s=10)
"""

from .daemon import DaemonProcess
from .dealer import BareClient

__all__ = ["BareClient", "DaemonProcess"]
