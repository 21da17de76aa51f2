"""Programs as JSON files that people read and that tests run.

A file may come from a stranger: whatever is in it, `load` gives a program that can be run, or says
in one line what is wrong.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from swa_jax.config import PoolConfig
from swa_jax.debug.calls import CALLS
from swa_jax.debug.limits import MOST_FILE_BYTES, shown
from swa_jax.debug.program import Call, Outcome, Program, check_program
from swa_jax.debug.values import MOST_INT, is_int32
from swa_jax.replay.outfile import OutFile
from swa_jax.unified import UnifiedLayout

FORMAT, VERSION = "swa_jax program", 1
_OF_A_FILE = ("format", "version", "about", "config", "calls")
_OF_A_CALL = ("call", "name", "owner", "left", "ok", "faults")
_MOST_DIGITS = 4000
_FLAGS = ("chunked", "pure_swa_pool", "owner_tags")


def save(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes a program as a file, whole or not at all.

    Args:
      program: of `Recorder.program`, `shrink`, or made by hand.
      path: a file; what is there is replaced.

    Raises:
      ValueError: a program that `load` would refuse, or a file that cannot be written.
    """
    check_program(program)
    text = as_text(program).encode()
    if len(text) > MOST_FILE_BYTES:
        raise ValueError(
            f"the program takes {len(text)} bytes as a file, and {MOST_FILE_BYTES} are allowed: "
            "keep fewer calls"
        )
    OutFile("program", os.fspath(path)).write(text)


def load(path: str | os.PathLike[str]) -> Program:
    """Reads a program.

    Args:
      path: a file of `save`, or one written by hand.

    Returns:
      The program. It can be run: nothing in it is unknown or too large.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no program; says what is wrong, in which call, and the value seen.
    """
    with Path(path).open("rb") as stream:
        raw = stream.read(MOST_FILE_BYTES + 1)
    try:
        if len(raw) > MOST_FILE_BYTES:
            raise ValueError(f"longer than the {MOST_FILE_BYTES} bytes allowed")
        return from_text(raw)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is no program: {error}") from None


def as_text(program: Program) -> str:
    """The JSON of a program, one line for each call; the same for equal programs."""
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    if program.about:
        head["about"] = program.about
    head["config"] = config_as_plain(program.config)
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    calls = [
        "  " + json.dumps(_call_as_plain(number, call))
        for number, call in enumerate(program.calls, start=1)
    ]
    inside = "\n" + ",\n".join(calls) + "\n " if calls else ""
    return "\n".join(["{", *lines, f' "calls": [{inside}]', "}", ""])


def config_as_plain(config: PoolConfig) -> dict[str, Any]:
    """What is not as by default, by name."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            layout = isinstance(value, UnifiedLayout)
            plain[field.name] = dataclasses.asdict(value) if layout else value
    return plain


def _call_as_plain(number: int, call: Call) -> dict[str, Any]:
    plain: dict[str, Any] = {"call": number, "name": call.name}
    if call.owner is not None:
        plain["owner"] = call.owner
    for name in call.kind.arguments:
        if name in call.arguments:
            plain[name] = call.arguments[name]
    if call.outcome is not None:
        plain["left"] = list(call.outcome.left)
        if call.outcome.ok is not None:
            plain["ok"] = call.outcome.ok
        if call.outcome.faults:
            plain["faults"] = dict(call.outcome.faults)
    return plain


def from_text(text: str | bytes) -> Program:
    """The program that JSON text holds.

    Raises:
      ValueError: as for `load`.
    """
    try:
        plain = json.loads(
            text, parse_constant=_no_number, parse_int=_int, object_pairs_hook=_once_each
        )
    except RecursionError:
        raise ValueError("its lists are too deep") from None
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None
    _check_object("the file", plain, _OF_A_FILE, needs=("format", "version", "config", "calls"))
    if plain["format"] != FORMAT or not _is(plain["version"], VERSION):
        raise ValueError(
            f"it must say format {FORMAT!r} and version {VERSION}, got {shown(plain['format'])} "
            f"and {shown(plain['version'])}"
        )
    if not isinstance(plain["calls"], list):
        raise ValueError(f"calls must be a list, got {shown(plain['calls'])}")
    config = config_from_plain(plain["config"])
    calls = tuple(_call(number, call) for number, call in enumerate(plain["calls"], start=1))
    program = Program(config, calls, plain.get("about", ""))
    check_program(program)
    return program


def _is(value: object, number: int) -> bool:
    return is_int32(value) and value == number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that a program can hold")


def _int(digits: str) -> int:
    """Python reads no number of thousands of digits, and says so in words of its own."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is none that int32 holds")
    return int(digits)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{shown(name)} is given twice in one object")
        made[name] = value
    return made


def _check_object(
    what: str, plain: object, known: tuple[str, ...], *, needs: tuple[str, ...] = ()
) -> None:
    if not isinstance(plain, dict):
        raise ValueError(f"{what} must be an object, got {shown(plain)}")
    missing = [name for name in needs if name not in plain]
    unknown = [name for name in plain if name not in known]
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has {shown(unknown[0])}"
        raise ValueError(f"{what} {wrong}; it may have {', '.join(known)}")


def config_from_plain(plain: object) -> PoolConfig:
    """The configuration of `config_as_plain`.

    Raises:
      ValueError: sizes that cannot work, with those that would.
    """
    names = tuple(field.name for field in dataclasses.fields(PoolConfig))
    _check_object("config", plain, names, needs=("full_tokens", "swa_tokens"))
    assert isinstance(plain, dict)
    parts = dict(plain)
    for name, value in parts.items():
        if name == "unified_layout" and value is not None:
            parts[name] = _layout(value)
        elif name in _FLAGS and not isinstance(value, bool):
            raise ValueError(f"config: {name} must be true or false, got {shown(value)}")
        elif name not in _FLAGS and value is not None and not is_int32(value):
            raise ValueError(f"config: {name} must be a positive integer, got {shown(value)}")
    try:
        return PoolConfig(**parts)
    except ValueError as error:
        raise ValueError(f"config: {error}") from None


def _layout(plain: object) -> UnifiedLayout:
    names = tuple(field.name for field in dataclasses.fields(UnifiedLayout))
    _check_object("config: unified_layout", plain, names, needs=names)
    assert isinstance(plain, dict)
    for name, value in plain.items():
        if not is_int32(value) or not 1 <= value <= MOST_INT:
            raise ValueError(
                f"config: {name} must be an integer from 1 to {MOST_INT}, got {shown(value)}"
            )
    layout = UnifiedLayout(**plain)
    if layout.block_units < layout.padding_units:
        raise ValueError(
            f"config: a block of {layout.block_units} units holds no page of "
            f"{layout.padding_units} units"
        )
    return layout


def _call(number: int, plain: object) -> Call:
    what = f"call {number}"
    if not isinstance(plain, dict):
        raise ValueError(f"{what} must be an object, got {shown(plain)}")
    if not _is(plain.get("call"), number):
        raise ValueError(
            f'{what} must say "call": {number}, got {shown(plain.get("call"))}: calls are numbered '
            "from 1 in order, since others name them by number"
        )
    name = plain.get("name")
    if not isinstance(name, str) or name not in CALLS:
        raise ValueError(f"{what}: no such call: {shown(name)}; known are {', '.join(CALLS)}")
    arguments = {key: value for key, value in plain.items() if key not in _OF_A_CALL}
    return Call(name, arguments, plain.get("owner"), _outcome(what, plain))


def _outcome(what: str, plain: Mapping[str, Any]) -> Outcome | None:
    if "left" not in plain:
        if "ok" in plain or "faults" in plain:
            raise ValueError(f"{what} says what came of it without left, the tokens left after it")
        return None
    left = plain["left"]
    left = tuple(left) if isinstance(left, list) else left
    return Outcome(left, plain.get("ok"), plain.get("faults", {}))
