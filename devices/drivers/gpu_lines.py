"""Lines: the commands of a GPU that have been begun, one line per queue, from their first event to their end.

Called by the device (gpu.py) on the clock's thread only. Every command has a program (gpu_transfers.py); a line goes on
with all of its programs, and ends commands in order. While anything is out, the lines have themselves polled.

Three things end badly. A program that raises ends its command once what it enqueued is done. A GPU that is lost ends
everything as Gone. And when nothing has become done for `deadline_s` although something is out, the oldest command ends
as Timeout and everything else as Gone; what the GPU may still write to is then kept for as long as the process lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierloop.devices.clocks import Clock
from tierloop.devices.commands import Command, Launch, Traffic, verb
from tierloop.devices.completion import Completion
from tierloop.devices.drivers import guard
from tierloop.devices.drivers.failures import as_device_error
from tierloop.devices.drivers.gpu_runtime import Accelerator, Event, Stream, fault_of
from tierloop.devices.errors import DeviceError, Gone, OutOfMemory, Timeout
from tierloop.devices.kernels import contract
from tierloop.devices.queues import QueueSet

if TYPE_CHECKING:
    from tierloop.devices.drivers.gpu_transfers import Last, Program

LEFT_BEHIND: list[object] = []
"""What a GPU that does not answer may still write to."""


class Running:
    """A command that was begun: its program, what it waits for, and the event before its work."""

    __slots__ = ("awaits", "completion", "error", "first", "is_last", "over", "program", "seen_ns", "stream")

    def __init__(self, completion: Completion, stream: Stream) -> None:
        self.completion = completion
        self.stream = stream
        self.first: Event = None
        self.program: Program | None = None
        self.awaits: Event = None
        self.is_last = False
        """Nothing is left to do but to wait for `awaits`."""
        self.over = False
        """The program is through: nothing is awaited any more."""
        self.seen_ns = 0
        """When the last event that it waited for was seen to be done."""
        self.error: DeviceError | None = None

    @property
    def op(self) -> str:
        """What the command is called."""
        return verb(self.completion.command)

    @property
    def nbytes(self) -> int:
        """What the command moves."""
        return size_of(self.completion.command, self.completion.traffic)


class Lines:
    """The lines of one GPU. `begin` makes a program of a command; `ended` is told of each that ended well, with ns."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        accelerator: Accelerator,
        num: int,
        deadline_s: float,
        poll_ns: int,
        begin: Callable[[Command, Stream], Program],
        ended: Callable[[Completion, int], None],
    ) -> None:
        from tierloop.devices.drivers.gpu_transfers import Last

        self._name = name
        self._clock = clock
        self._accelerator = accelerator
        self._deadline_s = deadline_s
        self._poll_ns = poll_ns
        self._begin = begin
        self._ended = ended
        self._last: type[Last] = Last
        self._lines: list[deque[Running]] = [deque() for _ in range(num)]
        self._event_of: dict[Completion, Event] = {}
        self._progress_ns = 0
        self._ticking = self._polling = self._stopped = False
        self.streams = [accelerator.stream() for _ in range(num)]
        self.gone = ""
        """Why nothing works any more, or nothing."""

    def attach(self, queues: QueueSet) -> None:
        """The queues that commands come from; said once, before the first of them."""
        self._queues = queues

    def start(self, completion: Completion) -> None:
        """Enqueue what can be enqueued. Never raises: a command may be begun before those ahead of it have ended."""
        if self._stopped:
            return
        running = Running(completion, self.streams[completion.queue])
        if not any(self._lines):
            self._progress_ns = self._clock.now()
        self._lines[completion.queue].append(running)
        try:
            if self.gone:
                raise Gone(self._name, running.op, self.gone)
            for earlier in completion.after:
                event = self._event_of.get(earlier)
                if event is not None and earlier.queue != completion.queue:
                    self._accelerator.wait(running.stream, event)
            running.first = self._accelerator.record(running.stream)
            running.program = self._begin(completion.command, running.stream)
        except (RuntimeError, DeviceError) as error:
            running.error = self.failure(running.op, error, running.nbytes)
            running.is_last = running.over = True
        else:
            self._resume(running)
        self._tick_soon()

    def poll(self) -> None:
        """Go on with every program whose event is done, and end the commands that are through."""
        if self._polling or self._stopped:
            return
        self._polling = True
        try:
            for line in self._lines:
                # Only the last that was begun can have more to do: the next one begins when it has not.
                if line and not line[-1].is_last and (line[-1].awaits is None or self._is_done(line[-1])):
                    self._resume(line[-1])
                while line and line[0].is_last and (line[0].over or self._is_done(line[0])):
                    self._end(line.popleft())
            self._look_for_the_stuck()
            if self.gone:
                self._end_all()
        finally:
            self._polling = False

    def stop(self, *others: Stream) -> bool:
        """Begin and end nothing any more, and wait for what is enqueued, on other streams too.

        False if it is not done by the deadline.
        """
        self._stopped = True
        if self.gone:
            return True
        try:
            events = [self._accelerator.record(stream) for stream in (*self.streams, *others)]
            quiet = wait_until(
                self._clock, lambda: all(map(self._accelerator.done, events)), self._deadline_s, self._poll_ns
            )
        except RuntimeError as error:
            self.failure("close", error, 0)
            quiet = True
        return quiet

    def forget(self) -> None:
        """Let go of every program: nothing that is enqueued needs them."""
        self._lines = []
        self._event_of.clear()

    def failure(self, op: str, error: BaseException, nbytes: int) -> DeviceError:
        """The device error for what torch, or a kernel's checks, raised; with a GPU that is lost, all is `gone`."""
        fault = fault_of(error)
        if fault == "memory":
            made: DeviceError = OutOfMemory(
                self._name, op, f"no room for a command of {nbytes} bytes, {self._free()} are free: {error}"
            )
        elif fault == "lost":
            self.gone = self.gone or f"{op} of {nbytes} bytes on {self._accelerator.name}: {error}"
            made = Gone(self._name, op, f"{nbytes} bytes on {self._accelerator.name}: {error}")
        else:
            return as_device_error(self._name, op, error)
        made.__cause__ = error
        return made

    def _free(self) -> str:
        try:
            return f"{self._accelerator.memory()[0]} bytes besides the regions' memory"
        except RuntimeError:
            return "nobody knows how many bytes"

    def _resume(self, running: Running) -> None:
        """One more step of a program; what it raises ends its command once what it enqueued is done."""
        assert running.program is not None
        try:
            step = next(running.program)
        except StopIteration:
            running.is_last = running.over = True
        except BaseException as error:
            running.error = self.failure(running.op, error, running.nbytes)
            running.is_last = True
            self._await_all(running)
        else:
            if isinstance(step, self._last):
                running.awaits, running.is_last = step.event, True
                self._event_of[running.completion] = step.event
                self._queues.handed(running.completion)
            else:
                running.awaits = step
                if step is None:
                    return
        self._progress_ns = self._clock.now()

    def _await_all(self, running: Running) -> None:
        try:
            running.awaits = self._accelerator.record(running.stream)
        except RuntimeError as error:
            self.failure(running.op, error, running.nbytes)

    def _is_done(self, running: Running) -> bool:
        if self.gone:
            return False
        try:
            done = self._accelerator.done(running.awaits)
        except RuntimeError as error:
            running.error = self.failure(running.op, error, running.nbytes)
            return False
        if done:
            running.seen_ns = self._progress_ns = self._clock.now()
        return done

    def _end(self, running: Running) -> None:
        completion = running.completion
        self._event_of.pop(completion, None)
        if running.error is None:  # what host memory had lost was copied as zeros
            running.error = guard.loss(self._name, completion.command)
        if running.error is None:
            if isinstance(completion.command, Launch):
                sizes = [sum([s.spans.nbytes for s in operand]) for operand in completion.command.reads]
                completion.flops = contract.flops(completion.command.args, sizes)
            now = self._clock.now()
            if running.awaits is not None:
                # By the GPU's own clock: what is enqueued is ahead of what is done.
                took = self._accelerator.elapsed_ns(running.first, running.awaits)
                completion.started_ns = min(now, max(completion.started_ns, running.seen_ns - took))
            self._ended(completion, now - completion.started_ns)
        self._queues.finish(completion, running.error)

    def _look_for_the_stuck(self) -> None:
        waiting = [line[0] for line in self._lines if line]
        if not waiting or self.gone or self._clock.now() - self._progress_ns < self._deadline_s * 1e9:
            return
        first = min(waiting, key=lambda running: running.completion.started_ns)
        detail = f"{first.nbytes} bytes on {self._accelerator.name}: nothing has ended for {self._deadline_s:g} s"
        first.error = first.error or Timeout(self._name, first.op, detail)
        self.gone = f"{first.op} of {detail}"

    def _end_all(self) -> None:
        """Nothing that is out comes back, and what is begun meanwhile ends likewise."""
        while any(self._lines):
            for line in self._lines:
                while line:
                    running = line.popleft()
                    LEFT_BEHIND.append((running.program, running.completion.command))
                    self._event_of.pop(running.completion, None)
                    gone = Gone(self._name, running.op, self.gone)
                    self._queues.finish(running.completion, running.error or gone)

    def _tick_soon(self) -> None:
        if not self._ticking and any(self._lines):
            self._ticking = True
            self._clock.call_at(self._clock.now() + self._poll_ns, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self.poll()
        if not self._stopped:
            self._tick_soon()


def wait_until(clock: Clock, done: Callable[[], bool], deadline_s: float, poll_ns: int) -> bool:
    """Whether something holds before the deadline. A clock looks at what it waits for only when something falls due."""
    waiting = True

    def look_again() -> None:
        if waiting:
            clock.call_at(clock.now() + poll_ns, look_again)

    look_again()
    try:
        return clock.run_until(done, clock.now() + round(deadline_s * 1e9))
    finally:
        waiting = False


def size_of(command: Command, traffic: Traffic) -> int:
    """What a command's cost grows with: bytes moved; for `dense` arithmetic and bytes."""
    if isinstance(command, Launch) and isinstance(command.args, contract.Dense):
        return command.args.flops + command.args.weight_nbytes + command.args.activation_nbytes
    return sum(traffic.read.values()) + sum(traffic.written.values())
