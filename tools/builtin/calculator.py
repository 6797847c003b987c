"""The calculator: the value of an arithmetic expression. A call of it may run twice."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

from tools.spec import ToolError, ToolSpec

MAX_EXPRESSION = 500  # characters
MAX_BITS = 4096  # of an integer, results in between included: nothing here can take long

Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "ln": math.log,
    "log": math.log10,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
# In Python a caret is xor, which nobody means here.
_SIGNS: Mapping[str, str] = {
    "^": "**",
    "\u00d7": "*",
    "\u00f7": "/",
    "\u2212": "-",
    "plus": "+",
    "minus": "-",
    "times": "*",
    "multiplied by": "*",
    "divided by": "/",
}
_SPOKEN = re.compile(
    r"[\^\u00d7\u00f7\u2212]|\b(?:plus|minus|times|multiplied\s+by|divided\s+by)\b", re.IGNORECASE
)
_CONSTANTS: Mapping[str, float] = {"e": math.e, "pi": math.pi}


async def calculator(expression: str) -> str:
    """The value of an arithmetic expression, as text. ToolError for what is not one."""
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"the expression is longer than {MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(_signs(expression), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, OverflowError, ZeroDivisionError, RecursionError, MemoryError) as exc:
        why = exc.msg if isinstance(exc, SyntaxError) else exc  # without a place in a file
        raise ToolError(f"cannot compute {expression!r}: {why}") from None
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _signs(expression: str) -> str:
    """An expression with the signs that people write, and the words that they say, as Python has them."""
    return _SPOKEN.sub(lambda sign: _SIGNS[" ".join(sign[0].lower().split())], expression.strip())


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool()):
            raise ToolError("only numbers can be computed with")
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
            try:
                return _bounded(_FUNCTIONS[name](*map(_value, args)))
            except TypeError:
                raise ToolError(f"{name} was given the wrong number or kind of arguments") from None
        case ast.Name(id=name):
            raise ToolError(f"{name} is not a number")
        case ast.Call(func=ast.Name(id=name)) if name not in _FUNCTIONS:
            raise ToolError(f"there is no function {name}; there are {', '.join(_FUNCTIONS)}")
    # In words: a small model that repeats an error would be led on and on by a row of signs.
    raise ToolError("only numbers, arithmetic signs, parentheses and functions can be computed with")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and abs(exponent) * max(base.bit_length(), 1) > MAX_BITS:
        raise ToolError("the power is too large to compute")
    result = base**exponent
    if isinstance(result, complex):
        raise ToolError("the result is not a real number")
    return result


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("a number is too large to compute with")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is not a finite number")
    return value


TOOLS = (
    ToolSpec(
        name="calculator",
        description="Add, subtract, multiply or divide numbers.",
        parameters={
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, operators, parentheses and functions such as sqrt.",
                }
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
        idempotent=True,
        timeout_s=5.0,
        run=calculator,
    ),
)
