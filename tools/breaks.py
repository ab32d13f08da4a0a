"""The ways to break a line: a comparison, a sign, a number, `and` for `or`, a condition negated, arguments swapped, a
call left out. `tools/mutate.py` runs the tests on them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST = 160  # characters of what is changed
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in"}
COMPARED |= {ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*"}
COMPUTED |= {ast.BitAnd: "|", ast.BitOr: "&"}
OTHER = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}
NO_SWAP = ("isinstance", "getattr", "cast")  # with swapped arguments these always raise


@dataclass(frozen=True)
class Break:
    """In a file, `before` is replaced by `after`. place: first line and column, last line and column, in bytes. rough:
    it often ends in an error, which any test notices."""

    file: str
    place: tuple[int, int, int, int]
    before: str
    after: str
    rough: bool = False

    def applied(self, text: str) -> str:
        start, stop = span(text.encode(), self.place)
        before = text.encode()[start:stop].decode()
        if before != self.before:
            raise ValueError(f"{self.file}:{self.place[0]} has {before!r}, and the list {self.before!r}: draw it again")
        return (text.encode()[:start] + self.after.encode() + text.encode()[stop:]).decode()


def span(data: bytes, place: Sequence[int]) -> tuple[int, int]:
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[place[0] - 1] + place[1], starts[place[2] - 1] + place[3]


def changes(node: ast.AST) -> Iterator[str]:
    """What may stand in the place of an expression, and is no error in itself."""
    text = ast.unparse
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield f"(({text(left)}) {COMPARED[type(op)]} ({text(right)}))"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
            yield f"(({text(left)}) {COMPUTED[type(op)]} ({text(right)}))"
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in COMPUTED:
            yield f"{text(target)} {COMPUTED[type(op)]}= {text(value)}"
        case ast.BoolOp(op=op, values=[first, *more]):
            yield f"({(' or ' if isinstance(op, ast.And) else ' and ').join(f'({text(v)})' for v in (first, *more))})"
            yield f"({text(more[0] if len(more) == 1 else ast.BoolOp(op, more))})"
        case ast.UnaryOp(operand=operand):
            yield f"({text(operand)})"
        case ast.Constant(value=bool(value)):
            yield repr(not value)
        case ast.Constant(value=int() | float() as number):
            yield repr(number + 1)


def rough_changes(node: ast.AST) -> Iterator[str]:
    """What may stand in the place of an expression or a simple statement, and often ends in an error."""
    text = ast.unparse
    match node:
        case ast.Tuple(elts=[one, other, *more], ctx=ast.Load()):
            if not any(isinstance(part, ast.Slice) for part in node.elts):
                yield f"({', '.join(map(text, (other, one, *more)))})"
        case ast.Return(value=ast.expr()):
            yield "return None"
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.Call(func=ast.Name(id=name), args=[one], keywords=[]) if name in OTHER:
            yield f"{OTHER[name]}({text(one)})"
        case ast.Call(func=func, args=[one, other, *more], keywords=named) if text(func) not in NO_SWAP:
            yield text(ast.Call(func, [other, one, *more], named))
        case ast.Call(args=[one], keywords=[]) if not isinstance(one, ast.Starred | ast.GeneratorExp):
            yield f"({text(one)})"


def kept_parts(node: ast.AST) -> list[ast.AST]:
    """The parts that are not broken: types, texts of errors, f-strings (their columns are unknown)."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return list(ast.iter_child_nodes(node))
        case ast.AnnAssign() | ast.arg() if node.annotation is not None:
            return [node.annotation]
        case ast.FunctionDef(returns=returns, decorator_list=decorators):
            return [*decorators, *([] if returns is None else [returns])]
        case ast.ClassDef(decorator_list=decorators):
            return list(decorators)
    return []


def breaks(file: str, text: str) -> Iterator[Break]:
    """Every `Break` of a file."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        whole = kept_parts(node)
        waiting += [child for child in ast.iter_child_nodes(node) if child not in whole]
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", [])
        changed: list[tuple[Any, str, bool]] = [(test, f"(not ({ast.unparse(test)}))", False) for test in tests]
        changed += [(node, after, False) for after in changes(node)]
        changed += [(node, after, True) for after in rough_changes(node)]
        for part, after, rough in changed:
            place = (part.lineno, part.col_offset, part.end_lineno, part.end_col_offset)
            start, stop = span(text.encode(), place)
            if stop - start <= LONGEST and after != ast.unparse(part):
                yield Break(file, place, text.encode()[start:stop].decode(), after, rough)
