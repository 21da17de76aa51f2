"""The `swa-jax` command: a module for each command, and what they have in common."""
