"""Mutants drawn from the syntax tree: every comparison, mask, mode, clamp, step by one.

What changes no value on the device is left out: annotations, decorators, docstrings, and functions
that only write messages.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from .patch import Mutant, flat, source_of

# Writing of messages for people; other tests compare texts.
MESSAGES = {"describe", "_pool_lines", "_mapping_lines", "__repr__", "__str__"}
SIGNS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
OTHER = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}


def mutants_of(file: str) -> list[Mutant]:
    """Every mutant of one module of the package, in the order of its text."""
    return mutants_in(file, source_of(file))


def mutants_in(file: str, source: str) -> list[Mutant]:
    """Every mutant of a module that reads so."""
    text = _Text(source)
    found = [
        Mutant(file, where, text.of(node), new, start=text.start(node), says=says)
        for where, node in _expressions(ast.parse(source), "")
        for new, says in _changes(node, text)
    ]
    alike: Counter[str] = Counter()
    numbered = []
    for mutant in sorted(found, key=lambda each: each.start):
        numbered.append(replace(mutant, nth=alike[mutant.name]))
        alike[mutant.name] += 1
    return numbered


class _Text:
    """Source text by the places that syntax nodes give: lines, and bytes within a line."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = source.splitlines(keepends=True)
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line))
        self._starts = starts

    def _place(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def start(self, node: ast.expr | ast.keyword) -> int:
        return self._place(node.lineno, node.col_offset)

    def of(self, node: ast.expr | ast.keyword) -> str:
        end = self._place(node.end_lineno or 0, node.end_col_offset or 0)
        return self._source[self.start(node) : end]


def _expressions(tree: ast.AST, where: str) -> Iterator[tuple[str, ast.expr | ast.keyword]]:
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise):
                continue
            inside = where
            if isinstance(node, ast.FunctionDef):
                inside = f"{where}.{node.name}" if where else node.name
                if node.name in MESSAGES:
                    continue
            elif isinstance(node, ast.AnnAssign) and "Alias" in ast.unparse(node.annotation):
                continue
            if isinstance(node, ast.expr | ast.keyword):
                yield inside, node
            yield from _expressions(node, inside)


def _changes(node: ast.expr | ast.keyword, text: _Text) -> Iterator[tuple[str, str]]:
    """What may stand for a node, and what that is called where it is long."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            yield from _other_comparisons(text, left, ops, comparators)
        case ast.BoolOp(values=values):
            word = " and " if isinstance(node.op, ast.And) else " or "
            for left_out in values:
                rest = [text.of(each) for each in values if each is not left_out]
                rest = [f"({each})" for each in rest] if rest[1:] else rest
                yield f"({word.join(rest)})", ""
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
            yield f"({text.of(left)})", ""
            yield f"({text.of(right)})", ""
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            yield f"({text.of(operand)})", ""
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            yield f"({text.of(left)})", ""
        case ast.keyword(arg="mode", value=ast.Constant(value="drop" | "fill")):
            yield 'mode="clip"', ""
        case ast.keyword(arg="mode", value=ast.Constant(value="clip")):
            yield 'mode="fill"', ""
        case ast.Call(func=ast.Name(id="look_up" | "put" as name), args=[table, index, value]):
            of, at = text.of(table), text.of(index)
            inside = f"jnp.minimum({at}, ({of}).shape[0] - 1)"
            changed = f"{name}({of}, {inside}, {text.of(value)})"
            yield changed, f"{name}({flat(of)}, {flat(at)}) => past the end is the end"
        case ast.Call(
            func=ast.Attribute(attr="where"),
            args=[ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call() as mask, yes, no],
        ):
            for always in ("| True", "& False"):
                changed = f"{text.of(mask)} {always}"
                rest = f"{text.of(yes)}, {text.of(no)}"
                yield f"jnp.where({changed}, {rest})", f"where {flat(text.of(mask))} => {changed}"
        case ast.Call(func=ast.Attribute(attr="maximum" | "minimum"), args=[kept, _], keywords=[]):
            yield f"({text.of(kept)})", ""
        case ast.Call(func=ast.Name(id="replace"), args=[first], keywords=keywords):
            for left_out in keywords:
                rest = [text.of(each) for each in keywords if each is not left_out]
                changed = f"replace({', '.join([text.of(first), *rest])})"
                yield changed, f"replace({flat(text.of(first))}) => without {left_out.arg}"


def _other_comparisons(
    text: _Text, left: ast.expr, ops: list[ast.cmpop], comparators: list[ast.expr]
) -> Iterator[tuple[str, str]]:
    """Each comparison of a chain turned by one step: at its border, or round where it has none."""
    values = [text.of(each) for each in (left, *comparators)]
    signs = [SIGNS.get(type(op), "") for op in ops]
    if not all(signs):
        return
    for place, op in enumerate(ops):
        changed = [*signs[:place], OTHER[type(op)], *signs[place + 1 :]]
        rest = "".join(f" {sign} {value}" for sign, value in zip(changed, values[1:], strict=True))
        yield values[0] + rest, ""
