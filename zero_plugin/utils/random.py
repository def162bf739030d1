"""Seeds, and the same state of the random number generators on all processes."""

from zero_plugin.distributed.seeding import set_seed as set_seed
from zero_plugin.distributed.seeding import synchronize_rng_state as synchronize_rng_state
from zero_plugin.distributed.seeding import synchronize_rng_states as synchronize_rng_states
