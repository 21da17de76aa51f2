"""The first minute with an installed swa_jax, and with nothing but what pip brings with it."""

import sys
from pathlib import Path

import swa_jax as swa

state = swa.init(swa.PoolConfig(full_tokens=64, swa_tokens=64, page_size=16, sliding_window=32))
state, grant = swa.alloc_extend(state, [0, 0], [20, 5], [-1, -1], capacity=32)
assert grant.ok, "25 tokens fit pools of 64"
assert int(grant.count) == 25, grant
swa.check(swa.free(state, grant.slots))

found = Path(swa.__file__)
assert "site-packages" in found.parts, f"not the installed one: {found}"
assert (found.parent / "py.typed").exists(), "the types are not marked"
strange = {"typer", "rich", "matplotlib", "hypothesis", "torch"} & sys.modules.keys()
assert not strange, f"swa_jax alone imports {strange}"
