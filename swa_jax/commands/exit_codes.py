"""What `swa-jax` exits with: the numbers, and the one text that every help page takes them from."""

OK = 0
FOUND = 1
BAD_INPUT = 2
INTERRUPTED = 130  # as shells count it: 128 + SIGINT
READER_GONE = 141  # 128 + SIGPIPE

_ANY = "the command found something wrong (leaks, faults, a broken law, a failed self-test)"


def exit_codes(found: str | None = _ANY) -> str:
    """The last paragraph of a help page.

    Args:
      found: what exit code 1 stands for in this command; None where it never ends with that.
    """
    parts = [f"{OK} all went well"]
    if found is not None:
        parts.append(f"{FOUND} {found}")
    parts += [
        f"{BAD_INPUT} bad input or something missing",
        f"{INTERRUPTED} interrupted",
        f"{READER_GONE} nobody reads the output any more",
    ]
    return f"Exit codes: {', '.join(parts)}."
