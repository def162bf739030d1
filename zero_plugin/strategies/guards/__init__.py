"""Guards of all strategies, one per file. See `zero_plugin.strategies.events.Guard`."""
