"""Guards of all strategies: one file each, with one promise. See `zero_plugin.strategies.events.Guard`."""
