"""Seeds, and one state of the random number generators for all processes."""

from __future__ import annotations

from zero_plugin.distributed.seeding import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
