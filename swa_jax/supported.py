"""The oldest and newest versions that `make matrix` tests. What is newer may work as well."""

PYTHON = ("3.11", "3.13")
JAX = ("0.10.0", "0.10.2")  # of jaxlib too
NUMPY = ("2.0", None)  # what the oldest JAX asks for; nothing newer has been a trouble
