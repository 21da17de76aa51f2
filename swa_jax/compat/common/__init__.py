"""What the class interfaces share: states by rank, compiled calls, host arrays in and out."""
