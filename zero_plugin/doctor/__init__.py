"""What `zero-plugin doctor` looks at on a machine: small checks from facts to findings."""
