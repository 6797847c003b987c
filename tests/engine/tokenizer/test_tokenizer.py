"""Tokens to text and messages to prompts, compared with the libraries that they replace."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.backends.scripted_tokens import scripted_tokenizer
from engine.dialects.spec import History
from engine.tokenizer.chat_template import render_template
from engine.tokenizer.tokenizer import Detokenizer, Tokenizer
from engine.types import LoadError, RenderError, RenderInput

TINY = Path("engine/tiny/checkpoint")


@lru_cache
def tiny() -> Tokenizer:
    return Tokenizer.load(TINY)


@lru_cache
def sentencepiece(kind: str = "llama") -> Tokenizer:
    """A tokenizer as Llama 2 and early Mistral have: spaces as U+2581, unknown characters as bytes."""
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", "h", "e", "l", "o", "▁h", "he", "ll", "llo", "▁he", "▁hello", "w", "r", "d", "▁w", "▁wo"]
    merges = [("▁", "h"), ("h", "e"), ("l", "l"), ("ll", "o"), ("▁h", "e"), ("▁he", "llo")]
    merges += [("▁", "w"), ("▁w", "o")]
    backend = Backend(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if kind == "llama":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        spaces = decoders.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), spaces])
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    return Tokenizer(backend, eos_token_ids=(2,))


def stream(tokenizer: Tokenizer, ids: Sequence[int], tags: frozenset[str] = frozenset()) -> str:
    stream = Detokenizer(tokenizer, tags, keep_first_space=False)
    return "".join([stream.push(token_id) for token_id in ids]) + stream.flush()


# -- tokens --------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 3071), max_size=30))
def test_streamed_text_is_the_library_s_decode(ids: list[int]) -> None:
    tokenizer = tiny()
    assert stream(tokenizer, ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == stream(tokenizer, ids)


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet="helo wrd 😀é\n", max_size=20))
def test_sentencepiece_text_is_the_library_s_decode(kind: str, text: str) -> None:
    tokenizer = sentencepiece(kind)
    ids = tokenizer.encode(text)
    assert stream(tokenizer, ids) == tokenizer._backend.decode(ids)
    keeping = Detokenizer(tokenizer, frozenset(), keep_first_space=True)
    kept = "".join(map(keeping.push, ids)) + keeping.flush()
    assert kept.removeprefix(" ") == stream(tokenizer, ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_text_survives(text: str) -> None:
    for tokenizer in (tiny(), scripted_tokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_whole_characters_only() -> None:
    tokenizer = scripted_tokenizer()
    detokenizer = Detokenizer(tokenizer, frozenset(), keep_first_space=False)
    assert [detokenizer.push(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert [detokenizer.push(byte) for byte in b"\xf0\x9fa"] == ["", "", "\ufffda"]
    assert detokenizer.push(0xC3) == ""
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")


def test_broken_byte_fallback_gives_one_replacement_a_byte() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.token_id("<0xF0>") or 0, tokenizer.token_id("<0x9F>") or 0]
    assert stream(tokenizer, ids) == tokenizer._backend.decode(ids) == "\ufffd\ufffd"


def test_token_bytes() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.token_bytes(tokenizer.token_id("<0x0A>") or 0) == b"\n"
    assert tokenizer.token_bytes(tokenizer.token_id("▁hello") or 0) == b" hello"
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tiny().token_bytes(tiny().token_id("<|im_end|>") or 0) == b"<|im_end|>"


def test_specials_are_hidden_but_for_tags() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    assert stream(tokenizer, ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert stream(tokenizer, ids, frozenset({"<think>", "<|im_end|>"})) == "a<think>b<|im_end|>"
    assert tokenizer.decode(ids) == "<|im_start|>a<think>b<|im_end|>"


def test_ids_beyond_the_vocabulary_are_nothing() -> None:
    assert stream(tiny(), [tiny().vocab_size + 7]) == ""


def test_plain_tokens_stay_within_their_budget() -> None:
    """Guards against an accidental O(n): the measured cost is 0.2 us, the design's budget 5 us."""
    tokenizer = tiny()
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 200)
    stream(tokenizer, ids)
    start = time.perf_counter()
    stream(tokenizer, ids)
    assert (time.perf_counter() - start) / len(ids) < 20e-6


# -- checkpoints ---------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, settings: dict[str, Any], **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend = Backend.from_str(scripted_tokenizer().serialized)
    backend.enable_truncation(3)  # some checkpoints ship with it on
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_load_merges_ends_and_adds_missing_tokens(tmp_path: Path) -> None:
    extra = {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    folder = write_checkpoint(
        tmp_path,
        {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "added_tokens_decoder": {"263": extra}},
        generation_config={"eos_token_id": [256, 258]},
        config={"eos_token_id": 257},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_ids == (256, 258, 257)
    assert tokenizer.encode("<extra>") == [263]
    assert [tokenizer.piece(token, frozenset()) for token in (263, 65)] == ["", "A"]
    assert tokenizer.vocab_size == 264
    assert len(tokenizer.encode("longer than three")) == 17
    with pytest.raises(RenderError, match="no chat template"):
        tokenizer.render(RenderInput([{"role": "user", "content": "hi"}]))


def test_templates_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path / "a", {"chat_template": named}))
    message = {"role": "user", "content": "hi"}
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.render(RenderInput([message])) == "D"
    assert tokenizer.render(RenderInput([message], tools=[tool])) == "T"
    assert tokenizer.chat_template == "T"
    folder = write_checkpoint(tmp_path / "b", {"chat_template": "C"})
    assert Tokenizer.load(folder).chat_template == "C"
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(folder).chat_template == "J"
    assert Tokenizer.load(folder, chat_template="A").chat_template == "A"
    prints = {Tokenizer.load(folder, chat_template=text).fingerprint for text in ("A", "B", "A")}
    assert len(prints) == 2


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(LoadError, match="not JSON"):
        Tokenizer.load(tmp_path)


# -- templates -----------------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & \"here\"",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip
CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}
CALLS = [{"id": "c1", "type": "function", "function": CALL}]
DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "short": [{"role": "user", "content": "Hi <b>&</b> 'you'"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Bye"},
    ],
    "tools": [
        {"role": "user", "content": "Weather in Zürich and Bern?"},
        {"role": "assistant", "content": None, "reasoning_content": "Call.", "tool_calls": CALLS * 2},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ],
    "prefill": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, "}],
}
TEMPLATES = {
    "tiny": (TINY / "chat_template.jinja").read_text(encoding="utf-8"),
    "loops": """{%- for m in messages %}
  {%- if m.role == 'system' %}{% continue %}{% endif %}
[{{ m.role }}] {{ m.content | trim if m.content }}{{ eos_token }}
{% if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}""",
    "constructs": """{{ bos_token }}{%- set ns = namespace(last=-1, names=[]) -%}
{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{ ns.last }} {{ tools | tojson(indent=2) if tools else 'none' }} {{ dict(a=1, **{'b': 2}) | tojson }}
{% generation %}{% set inner = 'x' %}{{ messages[-1].content }}{% endgeneration %}
{{ messages | tojson(separators=(',', ':'), sort_keys=true) }} {{ tone | default('plain') }}
{%- macro say(m) %}{{ m.content or '-' }}{% endmacro %}{{ say(messages[0]) }}{{ documents is none }}
{% for m in messages if m.thinking %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}""",
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own tokenizer of the shipped checkpoint."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(TINY))


@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_transformers_prompts(reference: Any, template: str, dialogue: str) -> None:
    messages, source = DIALOGUES[dialogue], TEMPLATES[template]
    for tools in ((), (TOOL,)):
        for prompt, extra in ((True, {}), (False, {"tone": "warm", "enable_thinking": False})):
            inp = RenderInput(messages, tools, prompt, template_kwargs=extra, chat_template=source)
            expected = reference.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=source,
                add_generation_prompt=prompt,
                tokenize=False,
                **extra,
            )
            text = tiny().render(inp)
            assert text == expected
            assert tiny().encode(text) == reference(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("content", ["One, two, ", "One, two", [{"type": "text", "text": "One, two"}]])
def test_a_message_to_go_on_from(reference: Any, content: Any) -> None:
    for template in ("tiny", "loops") if isinstance(content, str) else ("tiny",):
        messages = [*DIALOGUES["short"], {"role": "assistant", "content": content}]
        source = TEMPLATES[template]
        expected = reference.apply_chat_template(
            copy.deepcopy(messages), chat_template=source, continue_final_message=True, tokenize=False
        )
        inp = RenderInput(messages, continue_final_message=True, chat_template=source)
        assert tiny().render(inp) == expected
        assert messages[-1]["content"] == content


def test_both_encode_alike_with_special_tokens(reference: Any) -> None:
    assert tiny().encode("Hi there", add_special_tokens=True) == reference("Hi there")["input_ids"]


def test_arguments_are_printed_in_one_layout() -> None:
    def prompt(arguments: Any) -> str:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        return tiny().render(RenderInput([{"role": "assistant", "content": "", "tool_calls": calls}]))

    assert '"arguments": {"a": "é", "b": [1, 2]}}' in prompt('{"a":"\\u00e9","b":[1,2]}')
    assert '"arguments": {not json}' in prompt("{not json")
    assert '"arguments": {"a": "\\ud800"}}' in prompt('{"a": "\\ud800"}')  # no UTF-8 for it: left alone
    assert '"arguments": 5}' in prompt("5")
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    assert deep in prompt(deep)
    source = "{{ messages[0].tool_calls[0].function.arguments is string }}"
    call = {"function": {"name": "f", "arguments": "{}"}}
    inp = RenderInput([{"role": "assistant", "tool_calls": [call]}], chat_template=source)
    assert tiny().render(inp) == "False"
    assert tiny().render(inp, History(arguments="string")) == "True"
    assert call["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0].content + 1 }}", "refused"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{% if %}", "refused"),
        ("{{ ().__class__.__base__ }}", "unsafe|refused"),
        ("{{ messages.append(1) }}", "unsafe|refused"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "refused|cannot store"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ range(999999) | list }}", "refused"),
    ],
)
def test_templates_that_refuse(source: str, reason: str) -> None:
    with pytest.raises(RenderError, match=reason):
        tiny().render(RenderInput(DIALOGUES["short"], chat_template=source))


def test_inputs_that_are_refused() -> None:
    with pytest.raises(RenderError, match="no messages"):
        tiny().render(RenderInput([]))
    with pytest.raises(RenderError, match="may not replace messages"):
        tiny().render(RenderInput(DIALOGUES["short"], template_kwargs={"messages": []}))
    with pytest.raises(RenderError, match="no content to continue"):
        tiny().render(RenderInput([{"role": "assistant", "tool_calls": []}], continue_final_message=True))
    with pytest.raises(RenderError, match="drops part"):
        source = "{{ messages[0].role }} content"
        tiny().render(RenderInput(DIALOGUES["short"], continue_final_message=True, chat_template=source))


def test_the_date_is_the_run_s_own() -> None:
    now = datetime(2031, 5, 17, 23, 30, tzinfo=UTC).timestamp()
    inp = RenderInput(DIALOGUES["short"], now=now)
    source = "{% macro day() %}{{ strftime_now('%d %b %Y %H') }}{% endmacro %}{{ day() }}"
    assert render_template(source, inp, {}) == "17 May 2031 23"


def test_templates_see_plain_data() -> None:
    class Sly(str):
        def leak(self) -> str:
            return "secret"

    source = "{{ messages[0].content.leak is defined }} {{ messages[0].extra }}"
    inp = RenderInput([{"role": "user", "content": Sly("hi"), "extra": object()}], chat_template=source)
    assert tiny().render(inp) == "False <object>"
