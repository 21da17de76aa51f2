"""Tests beside the real thing, where it is installed."""

# Modules that run inside a peer's own tests, and import what the peer needs.
collect_ignore = ["levanter_named.py"]
