"""One end of an RDMA connection on a soft RDMA device: a queue pair, its completions, registered memory.

Imports nothing but pyverbs, and that when it is made: the second guest of a pair starts with it in two seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

POLL_S = 20.0
REMOTE_ACCESS_ERROR = 10
ANSWERS_IN = 18
"""4.096 us times two to this power: a second for an answer, eight times; a guest on a busy host may stand still."""
_MOST_GIDS = 16


@dataclass(frozen=True)
class Address:
    """What the other end has to know of a queue pair."""

    number: int
    gid: str


class End:
    """A queue pair that is not connected yet."""

    def __init__(self, name: str, ipv4: str) -> None:
        """On a device, for the address that its port has. Raises RuntimeError where no entry of its table is that."""
        import pyverbs.enums as e
        from pyverbs.cq import CQ
        from pyverbs.device import Context
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        self.e: Any = e
        self.device = Context(name=name)
        self.domain = PD(self.device)
        self.queue = CQ(self.device, 64)
        self.access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
        wanted = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=QPCap(16, 16, 1, 1))
        self.pair = QP(self.domain, wanted, QPAttr())
        self._gid_index = self._find(ipv4)

    @property
    def address(self) -> Address:
        """What the other end has to know."""
        return Address(int(self.pair.qp_num), str(self.device.query_gid(1, self._gid_index)))

    def connect(self, other: Address) -> None:
        """Join the other end, which does the same."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        e = self.e
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = self.access
        self.pair.to_init(attributes)
        attributes.dest_qp_num = other.number
        attributes.path_mtu = e.IBV_MTU_1024
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 1
        attributes.min_rnr_timer = 12
        route = GlobalRoute(dgid=GID(other.gid), sgid_index=self._gid_index)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.pair.to_rtr(attributes)
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = ANSWERS_IN, 7, 7
        self.pair.to_rts(attributes)

    def memory(self, nbytes: int) -> Any:
        """Registered memory."""
        from pyverbs.mr import MR

        return MR(self.domain, nbytes, self.access)

    def post(self, opcode: int, local: Any, nbytes: int, remote: int = 0, key: int = 0) -> None:
        """Post a request; `remote` and `key` are the other end's memory, for reads and writes."""
        from pyverbs.wr import SGE, SendWR

        request = SendWR(
            opcode=opcode, num_sge=1, sg=[SGE(local.buf, nbytes, local.lkey)], send_flags=self.e.IBV_SEND_SIGNALED
        )
        if remote:
            request.set_wr_rdma(key, remote)
        self.pair.post_send(request)

    def post_receive(self, local: Any, nbytes: int) -> None:
        """Have a message land in this memory."""
        from pyverbs.wr import SGE, RecvWR

        self.pair.post_recv(RecvWR(num_sge=1, sg=[SGE(local.buf, nbytes, local.lkey)]))

    def statuses(self, count: int = 1) -> list[int]:
        """The statuses of that many completions, or of those that came in time."""
        found: list[int] = []
        deadline = time.monotonic() + POLL_S
        while len(found) < count and time.monotonic() < deadline:
            _, completions = self.queue.poll(1)
            found += [int(one.status) for one in completions]
        return found

    def _find(self, ipv4: str) -> int:
        a, b, c, d = (int(part) for part in ipv4.split("."))
        mapped = f"ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
        known = []
        for index in range(_MOST_GIDS):
            try:
                known.append(str(self.device.query_gid(1, index)))
            except Exception:  # pyverbs raises its own kind past the end of the table
                break
            if known[-1].endswith(mapped):
                return index
        raise RuntimeError(f"no entry of the device's table is {ipv4}: {known}")
