"""Standard input and output, joined to a unix socket: how QEMU hands a connection out of the guest on.

QEMU starts it, one process for each connection, as `python relay.py SOCKET`; it ends when either side closes.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys


def main(path: str) -> None:
    """Copy both ways until one side has nothing more to say."""
    with socket.socket(socket.AF_UNIX) as far, selectors.DefaultSelector() as ready:
        far.connect(path)
        ready.register(0, selectors.EVENT_READ)
        ready.register(far, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                data = os.read(0, 1 << 16) if key.fd == 0 else far.recv(1 << 16)
                if not data:
                    return
                if key.fd == 0:
                    far.sendall(data)
                else:
                    _write_all(data)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main(sys.argv[1])
