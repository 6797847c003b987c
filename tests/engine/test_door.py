"""The engine's door is light, complete and picklable."""

from __future__ import annotations

import pickle
import subprocess
import sys
import typing
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import engine
from engine import interface, types

HEAVY = ("torch", "numpy", "tokenizers", "llguidance", "transformers", "jinja2", "llguidance.torch")


def loaded(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after running `code`."""
    show = f"import sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert loaded("import engine; engine.GenerateRequest; engine.EngineDead") == set()


def test_scripted_engine_loads_neither_torch_nor_grammars() -> None:
    assert loaded("from engine import ScriptedEngine; ScriptedEngine()") == {"tokenizers"}


def test_grammars_load_no_torch() -> None:
    assert loaded("import engine.structured.grammar") <= {"tokenizers", "llguidance", "numpy"}


def test_every_type_is_exported() -> None:
    for name, value in vars(types).items():
        public = not name.startswith("_") and getattr(value, "__module__", None) == "engine.types"
        if public or name == "Delta":
            assert getattr(engine, name) is value
            assert name in engine.__all__


def test_lazy_names() -> None:
    assert engine.ScriptedEngine.__name__ == "ScriptedEngine"
    assert engine.Say("x").text == "x"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        engine.Nothing  # type: ignore[attr-defined]  # noqa: B018


EXAMPLES: list[Any] = [
    types.GenerateRequest(
        id="r1",
        prompt_ids=(1, 2),
        sampling=types.SamplingParams(seed=1, max_tokens=5, stop=("x",), logit_bias=((1, 0.5),)),
        reader=types.ReaderParams(calls=True, max_calls=1, starts_in="reasoning"),
        constraint=types.Constraint((types.ToolShape("f", "{}"),), 1),
        prefix=((1,), (2, 3)),
        media=(types.MediaSpan(0, 1, b"h", types.Picture(b"png", b"d"), (0,)),),
    ),
    types.RenderInput(messages=({"role": "user", "content": "hi"},)),
    types.Prompt((1, 2), "reasoning"),
    types.Chunk(
        (1,),
        (
            types.Text("a", (types.TokenLogprob(1, "a", b"a", -0.5, ((2, "b", b"b", -1.0),)),)),
            types.Reasoning("r"),
            types.CallStart("f"),
            types.CallArgs("{}"),
            types.CallEnd(),
            types.Done("stop", "x"),
        ),
    ),
    types.ModelInfo("m", 10, 5, "f", (1,), types.SamplingDefaults(0.5), frozenset({"grammar"})),
    types.EngineStats(waiting=1),
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_values_survive_pickling(value: Any) -> None:
    assert is_dataclass(value) and fields(value)
    assert pickle.loads(pickle.dumps(value)) == value


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(types.PromptTooLong(11, 10)))
    assert (error.num_tokens, error.limit) == (11, 10)
    assert str(error) == "the prompt has 11 tokens; the context holds 10"
    for kind in (types.QueueFull, types.EngineDead, types.RequestFailed, types.ConstraintError):
        assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"


def test_scripted_engine_is_an_engine() -> None:
    methods = {name for name in vars(interface.Engine) if not name.startswith("_")}
    assert methods <= set(dir(engine.ScriptedEngine))
    assert typing.get_args(types.Delta)[-1] is types.Done
