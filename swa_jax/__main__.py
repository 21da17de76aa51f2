"""`python -m swa_jax` is the `swa-jax` command."""

import sys

from swa_jax.cli import main

sys.exit(main())
