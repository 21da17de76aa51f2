"""Timings of the transitions: what `swa-jax bench` and the repository's benchmarks share."""
