"""Tools: results whatever happens, and arithmetic that cannot be made to hurt."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import BUILTIN, UNKNOWN_EFFECT, ToolSpec, execute
from tools.builtin.calculator import calculator
from tools.encodings import read_text
from tools.runtime import MAX_OUTPUT
from tools.spec import ToolError

CALCULATOR = BUILTIN["calculator"]


async def compute(expression: str) -> str:
    result = await execute(CALCULATOR, json.dumps({"expression": expression}))
    assert (result.output is None) != (result.error is None)
    return result.output if result.output is not None else f"error: {result.error}"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("-2 ^ 2", "-4"),
        ("2 ** 10", "1024"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2 + 7 % 2", "4"),
        ("0.1 + 0.2", "0.3"),
        ("sqrt(16) + abs(-1)", "5"),
        ("round(2.675, 2)", "2.67"),
        ("max(1, 2, 3)", "3"),
        ("sin(pi)", "1.22464679915e-16"),
        ("  12345678901234567890 * 10 ", "123456789012345678900"),
        ("2 ^ 0.5", "1.41421356237"),
        ("2 ^ -1", "0.5"),
        ("65 times 62 minus 30", "4000"),
        ("7 Divided  by 2 \u00d7 4 \u2212 1 plus 1", "14"),
    ],
)
async def test_calculator(expression: str, value: str) -> None:
    assert await compute(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "10 ** 100000",
        "2 ** -100000",
        "1e308 * 10",
        "10 ** 1000 * 1.0",
        "exp(1000)",
        "1 / 0",
        "sqrt(-1)",
        "(-8) ^ 0.5",
        "__import__('os').system('true')",
        "().__class__",
        "'a' * 1000000000",
        "[1] * 1000000000",
        "x",
        "True + 1",
        "1 if 1 else 2",
        "round(1, ndigits=1)",
        "sqrt()",
        "sqrt(1, 2)",
        "lambda: 1",
        "1 << 100000",
        "",
        "1 +",
        "(" * 400,
        "-" * 450 + "1",
        "1" * 501,
        "\x00",
    ],
)
async def test_calculator_refuses(expression: str) -> None:
    began = time.perf_counter()
    answer = await compute(expression)
    assert answer.startswith("error: ") or set(expression) == {"-", "1"}
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("Hello", "Hello is not a number"),
        ("Hello there", "cannot compute 'Hello there': invalid syntax"),
        ("2 * len(x)", "there is no function len; there are abs, ceil,"),
        ("[1]", "only numbers, arithmetic signs, parentheses and functions can be computed with"),
    ],
)
async def test_calculator_says_what_is_wrong(expression: str, error: str) -> None:
    assert (await compute(expression)).startswith(f"error: {error}")


@settings(max_examples=200, deadline=500)
@given(st.text(alphabet="0123456789+-*/%^.() e", max_size=60))
def test_calculator_never_hurts(expression: str) -> None:
    try:
        assert isinstance(asyncio.run(calculator(expression)), str)
    except ToolError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "'expression' is a required property"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "'expression' is a required property"),
        ('{"expression": 1}', "argument 'expression' does not fit: 1 is not of type 'string'"),
        ('{"expression": "1", "other": 2}', "'other' was unexpected); there are expression"),
        ('{"expression": null}', "None is not of type 'string'"),
    ],
)
async def test_arguments_that_do_not_fit(arguments: str, words: str) -> None:
    result = await execute(CALCULATOR, arguments)
    assert result.output is None and result.error is not None and words in result.error


async def test_save_note() -> None:
    assert (await execute(BUILTIN["save_note"], '{"note": " tea \\n"}')).output == "Noted: tea"
    assert (await execute(BUILTIN["save_note"], '{"note": " "}')).error
    assert (await execute(BUILTIN["save_note"], json.dumps({"note": "x" * 5000}))).error


async def test_no_exception_gets_out(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks() -> str:
        raise RuntimeError("a secret")

    async def hangs() -> str:
        await asyncio.Event().wait()
        return ""

    async def floods() -> str:
        return "x" * (MAX_OUTPUT + 1)

    spec = ToolSpec("t", "", {"type": "object", "properties": {}}, run=breaks, timeout_s=0.05)
    broken = await execute(spec, "{}")
    assert broken.error == f"t failed: RuntimeError. {UNKNOWN_EFFECT}"
    sure = await execute(replace(spec, idempotent=True), "{}")
    assert sure.error == "t failed: RuntimeError"
    assert "tool t failed: RuntimeError at " in caplog.text
    assert f"{__file__}:{breaks.__code__.co_firstlineno + 1} in breaks" in caplog.text
    assert "a secret" not in caplog.text and "Traceback" not in caplog.text
    with caplog.at_level("DEBUG", "antiphon.tools"):
        await execute(spec, "{}")
    assert "RuntimeError: a secret" in caplog.text
    assert "longer than 0.05 s" in str((await execute(replace(spec, run=hangs), "{}")).error)
    assert "[cut:" in str((await execute(replace(spec, run=floods), "{}")).output)


async def test_halves_of_characters_go_no_further() -> None:
    """No JSON of ours can be written with them, and so no run could end."""

    async def names(error: bool) -> str:
        if error:
            raise ToolError("no file \udcff")
        return "a\ud83d\ude00b\ud800"

    parameters = {"type": "object", "properties": {"error": {"type": "boolean"}}}
    spec = ToolSpec("t", "", parameters, run=names)
    assert (await execute(spec, '{"error": false}')).output == "a😀b\N{REPLACEMENT CHARACTER}"
    assert (await execute(spec, '{"error": true}')).error == "no file \N{REPLACEMENT CHARACTER}"
    noted = await execute(BUILTIN["save_note"], '{"note": "\\ud800"}')
    json.dumps(noted.output, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("encoding", "data", "text"),
    [
        (None, "grün".encode(), "grün"),
        ("iso-8859-1", "grün".encode("latin-1"), "grün"),
        ("Shift_JIS", "東京".encode("shift_jis"), "東京"),
        ("punycode", b"gr-n-8ra", "gr-n-8ra"),
        ("utf-7", b"+2AA-", "+2AA-"),
        ("base64", b"YQ==", "YQ=="),
        ("no\0such", b"a", "a"),
    ],
)
def test_texts_are_read_in_the_encodings_of_texts(encoding: str | None, data: bytes, text: str) -> None:
    assert read_text(data, encoding) == text


async def test_a_cancelled_call_is_cancelled() -> None:
    began = asyncio.Event()

    async def hangs() -> str:
        began.set()
        await asyncio.Event().wait()
        return ""

    spec = ToolSpec("t", "", {"type": "object", "properties": {}}, run=hangs)
    task = asyncio.create_task(execute(spec, "{}"))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_the_model_is_told() -> None:
    assert {name: spec.idempotent for name, spec in BUILTIN.items()} == {
        "calculator": True,
        "save_note": False,
    }
    for name, spec in BUILTIN.items():
        assert (spec.name, spec.offered_by) == (name, "mcp")
        assert spec.description
        assert spec.parameters["type"] == "object"
        assert set(spec.parameters["required"]) <= set(spec.parameters["properties"])
        json.dumps(spec.parameters)
