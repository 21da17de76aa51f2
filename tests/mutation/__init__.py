"""Mutants of the package's source: one small change each, which the tests must notice.

`python -m tests.mutation --help` says how to run them.
"""
