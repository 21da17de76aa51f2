"""A long soak: mixed load in compiled loops, with the laws looked at after every step.

`python -m tests.soaking --help` says how to run it.
"""
