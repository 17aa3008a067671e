"""A run with a few of a model's layers that stands for all of them.

The layers of a phantom run are alike, so what a step of all would take follows from some: what passes between the ends
of two layers, once for each layer that is left out. Memories hold as small a share of the cache as there are layers,
and so should the limits on what may lie in them (`Engine.limit`). What a policy does in the background has to be paced
by steps, not by time, for the layers that are there to see their share of it; the policies here do so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Dense


@dataclass
class LayerSample:
    """`simulated` of `num_layers` layers: an observer of the platform that knows when each one ended.

    At least two are needed to tell a layer from the rest of a step. Raises ConfigurationError.
    """

    num_layers: int
    simulated: int
    _ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not min(2, self.num_layers) <= self.simulated <= self.num_layers:
            raise ConfigurationError(
                f"{self.simulated} layers are to stand for {self.num_layers}; it must be from "
                f"{min(2, self.num_layers)} to {self.num_layers}"
            )

    def __call__(self, completion: Completion) -> None:
        """A command of the platform has ended."""
        command = completion.command
        if isinstance(command, Launch) and isinstance(command.args, Dense) and command.args.label == "mlp":
            self._ends.append(completion.ended_ns)

    @property
    def whole(self) -> float:
        """How many times as much the model has."""
        return self.num_layers / self.simulated

    def left_out_ns(self, begun_ns: int) -> int:
        """How much longer the step that began at `begun_ns` would have taken with all layers."""
        ends, self._ends = [end for end in self._ends if end >= begun_ns], []
        if self.simulated == self.num_layers or len(ends) < 2:
            return 0
        return round((ends[-1] - ends[0]) * (self.num_layers - self.simulated) / (len(ends) - 1))
