"""What `zero-plugin doctor` looks at on a machine."""
