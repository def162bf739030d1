"""The guards of an engine's session, one per file, and their lists by ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zero_plugin.strategies.deepspeed.guards.frozen_later import FrozenLater
from zero_plugin.strategies.deepspeed.guards.hooks_on_sums import HooksOnSums
from zero_plugin.strategies.deepspeed.guards.lost_gradients import LostGradients, PartialGradients
from zero_plugin.strategies.deepspeed.guards.lost_weights import PartitionedWrites, UncountedWrites
from zero_plugin.strategies.deepspeed.guards.same_order import SameOrder
from zero_plugin.strategies.events import Guard
from zero_plugin.strategies.guards.differing_steps import DifferingSteps
from zero_plugin.strategies.guards.foreign_backward import ForeignBackward
from zero_plugin.strategies.guards.foreign_steps import ForeignSteps

# The order of calls at an event that several guards share. A guard comes first if a later guard would blame its mistake
# on another cause. Collective guards come last: otherwise they would wait for a process whose script has a mistake that
# only its own guards find.
GUARDS: Final[Mapping[int, tuple[type[Guard], ...]]] = {
    # Gradients stay in `p.grad`, and are averaged in the step.
    0: (ForeignBackward, ForeignSteps, LostGradients, FrozenLater, PartialGradients, UncountedWrites, DifferingSteps),
    # In 16 bits, gradients accumulate in buffers of the engine.
    1: (
        *(ForeignBackward, ForeignSteps, HooksOnSums, LostGradients, FrozenLater, PartialGradients, UncountedWrites),
        DifferingSteps,
    ),
    # Each backward reduces gradients, in the order in which they are computed.
    2: (
        *(ForeignBackward, ForeignSteps, HooksOnSums, LostGradients, FrozenLater, UncountedWrites, SameOrder),
        DifferingSteps,
    ),
    # Weights are partitioned too: a write into an empty weight is lost.
    3: (
        *(ForeignBackward, ForeignSteps, HooksOnSums, LostGradients, FrozenLater, PartitionedWrites, UncountedWrites),
        *(SameOrder, DifferingSteps),
    ),
}
