"""The guest rig: real drivers on a real kernel, on any machine that has Debian's apt.

A guest is a QEMU machine with a Debian kernel. It has NUMA nodes with HMAT values, NVMe drives, CXL memories and soft
RDMA, all described by a file (machine.py), and it sees the host's whole file system read-only under the same paths, so
that the checkout and its virtual environment run there unchanged. Nothing is installed on the host: packages are
fetched into a folder of their own (packages.py), unpacked there (layers.py, setting_up.py) and thrown away with it.

    setting_up   packages -> layers, atomically, once
    running      layers + machine -> a command's exit status, and why there is none
    qmp          what tests do to the hardware while it runs (back_door.py makes a FaultyHost of it)
    testing      one pytest process inside, its results outside
    capturing    what the kernel shows of the hardware, as golden trees

A guest's clock is no measure of anything: the processor is emulated (TCG), some twenty times slower than the host.
"""
