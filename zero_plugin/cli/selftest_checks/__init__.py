"""What `zero-plugin test` runs on the processes of a config."""
