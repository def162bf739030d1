"""What `zero-plugin test` runs on the processes of a config: collectives, one step, offload, a checkpoint, data."""
