"""A machine with an NVMe drive: the nodes and the sysfs tree that Linux shows, over a model of the controller.

`nvme_machine` makes a `ModelKernel` with /dev/nvme0 (admin commands), and for each namespace n /dev/ng0n<n> (its
generic character device) and /dev/nvme0n<n> (the block device). Requests of those nodes become commands in queues of
the controller model (kernel_nvme_host.py): what a driver measures and what it gets wrong passes through real entries,
PRPs, doorbells and completions.

What the nodes answer is what Linux does:

- Passthrough ioctls return the NVMe status as a positive number. A namespace that is not the node's, more bytes than
  one command takes, flags and metadata are EINVAL; a command that had to be given up is EINTR. Memory that the
  controller cannot reach directly (off a multiple of four) goes through a buffer of the kernel.
- Transfers of the block device follow the rules of O_DIRECT for every descriptor, because there is no page cache:
  EINVAL off the grid. They are cut into what a command takes. Statuses become the errno of the block layer, after five
  tries where the controller says that another try makes sense.
- io_uring takes transfers of the block device and passthrough commands (kernel_nvme_rings.py).

The clock is a counter that jumps to what is due when somebody waits, or `now_ns`. `hold` keeps completions of input and
output from coming back: a ring then answers ETIME, an ioctl ends when its own timeout has passed on the counter.
`unplug` pulls the drive out, `lose_power` switches it off and on; faults, temperature and wear are the controller's
(`NvmeMachine.controller`, nvme_controller.py), and so is the history of its media.
"""

from __future__ import annotations

from collections.abc import Callable

from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.emulators.kernel_memory import DeviceMemory, ProcessMemory
from tierloop.emulators.kernel_numa import NumaMemory
from tierloop.emulators.kernel_nvme_host import NvmeHost, Time
from tierloop.emulators.kernel_nvme_nodes import (
    ADMIN_MAJOR,
    BLOCK_MAJOR,
    GENERIC_MAJOR,
    LARGEST,
    AdminNode,
    BlockNode,
    Commands,
    GenericNode,
)
from tierloop.emulators.kernel_nvme_rings import carry_out
from tierloop.emulators.kernel_uring import ModelRing, Reply, Rings, Submission
from tierloop.firmware_models.media import Firmware
from tierloop.firmware_models.nvme_controller import NvmeController
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.passthrough import Passthrough

_ADDRESS = "0000:00:04.0"
_MOST_SEGMENTS = 128
_BUS = f"/sys/devices/pci0000:00/{_ADDRESS}"


class NvmeMachine(ModelKernel):
    """A machine with one NVMe drive. The back door: that of `ModelKernel`, `controller` and its own, `host`."""

    def __init__(self, controller: NvmeController, host: NvmeHost, tree: Tree, held: bool, seed: int) -> None:
        super().__init__(tree, model=f"a model of a machine with an NVMe drive ({controller.figures.model})")
        self.controller, self.host = controller, host
        commands = Commands(host)
        tree.folders.setdefault("/dev", set())
        self.add("/dev/nvme0", AdminNode(host, commands))
        for nsid in range(1, len(controller.namespaces) + 1):
            self.add(f"/dev/ng0n{nsid}", GenericNode(host, commands, nsid))
            self.add(f"/dev/nvme0n{nsid}", BlockNode(host, commands, nsid))
        self._rings = Rings(self, self._begin, self._pass_time, host.memory.check, host.disown, seed)
        if held:
            self.hold()

    def pin_on(self, memory: NumaMemory) -> None:
        """The process's memory lies on these nodes: what is registered with io_uring from now on is pinned there."""
        self._rings.pin, self._rings.unpin = memory.pin, memory.unpin

    def hold(self) -> None:
        """Completions of input and output do not come back any more."""
        with self.guard:
            self.controller.hold()

    def release(self) -> None:
        """What was held comes back."""
        with self.guard:
            self.controller.release()

    def unplug(self) -> None:
        """Pull the drive out: its nodes and its folders are gone, what is in flight is cancelled."""
        with self.guard:
            self.controller.remove()
            self.host.catch_up()
            for path in [path for path in self.nodes if path.startswith(("/dev/nvme0", "/dev/ng0"))]:
                self.remove(path)
            self.tree.remove(f"{_BUS}/nvme")
            for path in [path for path, target in self.tree.links.items() if f"{_ADDRESS}/nvme/" in target]:
                self.tree.remove(path)

    def lose_power(self) -> None:
        """The drive loses power and gets it back: what its cache held is lost, what was in flight is cancelled."""
        with self.guard:
            self.controller.power_off()
            self.host.catch_up()
            self.controller.power_on()
            self.host.restart()

    def _begin(self, ring: ModelRing, submission: Submission, reply: Reply) -> None:
        self.host.owner = ring
        try:
            carry_out(self, ring, submission, reply)
        finally:
            self.host.owner = None

    def _pass_time(self, most_ns: int) -> int | None:
        before = self.controller.now_ns
        return self.controller.now_ns - before if self.host.pass_time(most_ns) else None


def nvme_machine(
    capacity: int = 64 << 20,
    lba_nbytes: int = 512,
    figures: NvmeFigures | None = None,
    media: Callable[[int], Firmware] | None = None,
    unit_nbytes: int | None = None,
    namespaces: int = 1,
    now_ns: Callable[[], int] | None = None,
    held: bool = False,
    seed: int = 0,
    numa_node: int = 0,
) -> NvmeMachine:
    """A machine whose drive has `namespaces` of `capacity` bytes each.

    `media` makes the medium of a namespace from its capacity (a plain one of 3 GB/s if it is not given), and
    `unit_nbytes` is the grid of it, if it does not say that itself. `seed` is for the order in which completions come
    back through io_uring.
    """
    figures = figures or NvmeFigures()
    if namespaces < 1:
        raise ValueError(f"namespaces = {namespaces}: at least one")
    memory = ProcessMemory()
    reachable = DeviceMemory(memory)
    made = [Namespace(capacity, (media or _plain)(capacity), lba_nbytes, unit_nbytes) for _ in range(namespaces)]
    controller = NvmeController(figures, made, reachable)
    host = NvmeHost(controller, memory, reachable, Time(now_ns))
    return NvmeMachine(controller, host, _tree(figures, made, numa_node), held, seed)


def _plain(capacity: int) -> Firmware:
    return Passthrough(3_000_000_000, 3_000_000_000)


def _tree(figures: NvmeFigures, namespaces: list[Namespace], numa_node: int) -> Tree:
    """What Linux shows of the drive below /sys."""
    tree, drive = Tree(), f"{_BUS}/nvme/nvme0"
    for name, text in (
        ("model", figures.model.ljust(40)),
        ("serial", figures.serial.ljust(20)),
        ("firmware_rev", figures.firmware.ljust(8)),
        ("transport", "pcie"),
        ("address", _ADDRESS),
        ("numa_node", str(numa_node)),
        ("state", "live"),
        ("cntlid", "0"),
        ("queue_count", "3"),
        ("dev", f"{ADMIN_MAJOR}:0"),
    ):
        tree.put(f"{drive}/{name}", text)
    tree.put(f"{_BUS}/numa_node", str(numa_node))
    tree.link(f"{drive}/device", f"../../../{_ADDRESS}")
    tree.link(f"/sys/bus/pci/devices/{_ADDRESS}", f"../../../devices/pci0000:00/{_ADDRESS}")
    tree.link("/sys/class/nvme/nvme0", f"../../{drive.removeprefix('/sys/')}")
    tree.link(f"/sys/dev/char/{ADMIN_MAJOR}:0", f"../../{drive.removeprefix('/sys/')}")
    for nsid, namespace in enumerate(namespaces, 1):
        _namespace_tree(tree, drive, figures, nsid, namespace)
    return tree


def _namespace_tree(tree: Tree, drive: str, figures: NvmeFigures, nsid: int, namespace: Namespace) -> None:
    disk, generic = f"nvme0n{nsid}", f"ng0n{nsid}"
    largest = min(figures.largest_transfer or LARGEST, LARGEST) // 1024
    facts = {
        "dev": f"{BLOCK_MAJOR}:{nsid}",
        "size": str(namespace.capacity // 512),
        "ro": "0",
        "nsid": str(nsid),
        "wwid": f"eui.{namespace.identity(figures.serial, nsid).hex()}",
        "queue/logical_block_size": str(namespace.lba_nbytes),
        "queue/physical_block_size": str(namespace.lba_nbytes),
        "queue/max_hw_sectors_kb": str(largest),
        "queue/max_segments": str(min(largest // 4 + 1, _MOST_SEGMENTS)),
        "queue/max_sectors_kb": str(min(largest, 1280)),
        "queue/nr_requests": "127",
        "queue/rotational": "0",
        "queue/zoned": "none",
        "queue/write_cache": "write back" if figures.volatile_cache else "write through",
        "queue/fua": str(int(figures.volatile_cache)),
        "queue/dma_alignment": "3",
    }
    for name, text in facts.items():
        tree.put(f"{drive}/{disk}/{name}", text)
    tree.put(f"{drive}/{generic}/dev", f"{GENERIC_MAJOR}:{nsid - 1}")
    for child in (disk, generic):
        tree.link(f"{drive}/{child}/device", "../../nvme0")
    below = drive.removeprefix("/sys/")
    tree.link(f"/sys/block/{disk}", f"../{below}/{disk}")
    tree.link(f"/sys/class/block/{disk}", f"../../{below}/{disk}")
    tree.link(f"/sys/class/nvme-generic/{generic}", f"../../{below}/{generic}")
    tree.link(f"/sys/dev/block/{BLOCK_MAJOR}:{nsid}", f"../../{below}/{disk}")
    tree.link(f"/sys/dev/char/{GENERIC_MAJOR}:{nsid - 1}", f"../../{below}/{generic}")
