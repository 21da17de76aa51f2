"""The one exception of the class interfaces."""


class MisuseError(ValueError, AssertionError):
    """A call that no answer would be right for.

    The engines assert in such places, so their callers may catch either of the two.
    """
