"""QMP: how a running QEMU is told to change the hardware, from the host (a unix socket) or from the guest (TCP).

A command gets its answer, or a QmpError with QEMU's own words. Events that arrive in between are kept in `events`. No
call waits longer than the connection's time-out. One client at a time: QEMU answers the next when the first has left.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

from tierloop.devices.errors import DeviceError, NotPresent, ProtocolError, Timeout

WHERE = "TIERLOOP_GUEST_QMP"
"""The environment variable that says, in a guest, where its QMP is: an address and a port."""
_MOST_NBYTES = 1 << 24


class QmpError(DeviceError):
    """QEMU refused a command; `kind_of_error` is its class of error."""

    def __init__(self, command: str, kind_of_error: str, said: str) -> None:
        super().__init__("guest", command, f"{kind_of_error}: {said}")
        self.kind_of_error = kind_of_error
        self.said = said

    def __reduce__(self) -> tuple[type[QmpError], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), (self.op, self.kind_of_error, self.said)


class Qmp:
    """A connection. Use it in a `with` statement, or close it."""

    def __init__(self, where: str | Path, limit_s: float = 30.0) -> None:
        """Connect to a unix socket (a Path) or to ADDRESS:PORT. Raises NotPresent, ProtocolError, Timeout."""
        self.events: list[dict[str, Any]] = []
        self._limit_s = limit_s
        try:
            self._socket = _connected(where, limit_s)
        except OSError as error:
            raise NotPresent("guest", "qmp", f"{where} does not answer: {error}", error.errno) from error
        self._stream = self._socket.makefile("rb")
        try:
            greeting = self._receive("greeting")
            if "QMP" not in greeting:
                raise ProtocolError("guest", "qmp", f"{where} greets with {str(greeting)[:80]}")
            version = greeting["QMP"]["version"]["qemu"]
            self.version = ".".join(str(version[part]) for part in ("major", "minor", "micro"))
            self.ask("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_inside(cls) -> Qmp:
        """The connection of the guest that this process runs in. Raises NotPresent outside of one."""
        where = os.environ.get(WHERE)
        if not where:
            raise NotPresent("guest", "qmp", f"this process runs in no guest: {WHERE} is not set")
        return cls(where)

    def ask(self, command: str, **arguments: Any) -> Any:
        """What QEMU returns; underscores of names stand as they are. Raises QmpError, ProtocolError, Timeout."""
        told = {"execute": command, "arguments": arguments} if arguments else {"execute": command}
        try:
            self._socket.sendall(json.dumps(told).encode() + b"\n")
        except OSError as error:
            raise NotPresent("guest", command, f"QEMU has left: {error}", error.errno) from error
        while True:
            answer = self._receive(command)
            if "event" in answer:
                self.events.append(answer)
            elif "error" in answer:
                raise QmpError(command, str(answer["error"].get("class")), str(answer["error"].get("desc")))
            elif "return" in answer:
                return answer["return"]
            else:
                raise ProtocolError("guest", command, f"QEMU answers {str(answer)[:80]}")

    def close(self) -> None:
        """Leave; calling it again does nothing."""
        self._stream.close()
        self._socket.close()

    def __enter__(self) -> Qmp:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _receive(self, command: str) -> dict[str, Any]:
        try:
            line = self._stream.readline(_MOST_NBYTES)
        except TimeoutError:
            raise Timeout("guest", command, f"QEMU did not answer within {self._limit_s:g} s") from None
        except OSError as error:
            raise NotPresent("guest", command, f"QEMU has left: {error}", error.errno) from error
        if not line:
            raise NotPresent("guest", command, "QEMU has left")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise ProtocolError("guest", command, f"QEMU answers what is no JSON: {line[:80]!r}") from error
        if not isinstance(answer, dict):
            raise ProtocolError("guest", command, f"QEMU answers {line[:80]!r}")
        return answer


def _connected(where: str | Path, limit_s: float) -> socket.socket:
    if isinstance(where, Path):
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(limit_s)
        try:
            made.connect(str(where))
        except OSError:
            made.close()
            raise
        return made
    address, _, port = where.rpartition(":")
    return socket.create_connection((address, int(port)), limit_s)
