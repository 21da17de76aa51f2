"""Lets `isinstance` checks of an engine accept the classes here."""

import abc
from types import ModuleType

from swa_jax.compat.common.errors import MisuseError


def register_classes(engine: ModuleType, *ours: type) -> list[str]:
    """Makes each of `ours` a virtual subclass of the engine's class of the same name.

    Args:
      engine: module with abstract base classes or subclasses of such, as allocators of engines are.
      *ours: classes; those that the engine has no class of that name for are passed over.

    Returns:
      The names registered.

    Raises:
      MisuseError: a class of the engine that takes no registrations.
    """
    done = []
    for mine in ours:
        theirs = getattr(engine, mine.__name__, None)
        if theirs is None:
            continue
        if not isinstance(theirs, abc.ABCMeta):
            raise MisuseError(f"{theirs!r} is no abstract base class: isinstance cannot be taught")
        theirs.register(mine)
        done.append(mine.__name__)
    return done
