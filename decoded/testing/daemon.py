"""Starting a real daemon for a test, and stopping it whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoded.wire import link as wire

from .dealer import BareClient

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 60.0


class DaemonProcess:
    """`decoded serve` in a process of its own, with a folder and free ports of its own.

    `config` is the configuration tree as nested mappings; link.endpoint is chosen
    unless it is given. `folder` keeps socket, configuration and log from one start to the next.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, folder: Path | None = None) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="decoded-test-"))
        tree = {section: dict(keys) for section, keys in (config or {}).items()}
        link = tree.setdefault("link", {})
        self.endpoint: str = link.setdefault("endpoint", f"ipc://{self.folder}/decoded.sock")
        self._config = self.folder / "config.yaml"
        self._config.write_text(json.dumps(tree))
        self.log_path = self.folder / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def log(self) -> str:
        """Everything that the daemon has logged so far."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    def start(self) -> DaemonProcess:
        """Start it and wait until it answers. Raises RuntimeError with its log if it does not."""
        command = [sys.executable, "-m", "decoded", "serve", "--config", str(self._config)]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DECODED_")}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log, stdout=log, env=environ)
        if not self._answers():
            self.kill()
            raise RuntimeError(f"the daemon did not start; its log:\n{self.log}")
        return self

    def status(self, **query: Any) -> dict[str, Any]:
        """The daemon's status report; `query` as in StatusQuery."""
        with BareClient(self.endpoint) as client:
            client.send(wire.StatusQuery(**query))
            return client.expect(wire.StatusReport).status

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end; the exit code."""
        process = self._running()
        process.send_signal(number)
        try:
            return process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the daemon did not stop; its log:\n{self.log}") from None

    def wait(self, timeout_s: float) -> int:
        """Wait for it to end by itself; the exit code."""
        return self._running().wait(timeout_s)

    def kill(self) -> None:
        """kill -9."""
        process = self._running()
        process.kill()
        process.wait()

    def close(self) -> None:
        """End it if it still runs, and remove what it wrote."""
        if self._process is not None and self._process.poll() is None:
            self.stop()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the daemon was not started")
        return self._process

    def _answers(self) -> bool:
        with BareClient(self.endpoint) as client:
            client.send(wire.StatusQuery())
            tries = int(_START_TIMEOUT_S / 0.1)
            for _ in range(tries):
                try:
                    client.expect(wire.StatusReport, timeout_s=0.1)
                except TimeoutError:
                    if self._running().poll() is not None:
                        return False
                else:
                    return True
        return False

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
