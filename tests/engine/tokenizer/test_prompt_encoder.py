"""Remembered parts of prompts: the ids are those of the whole text, always."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.backends.scripted_tokens import scripted_tokenizer
from engine.dialects.table import choose_dialect
from engine.tokenizer.prompt_encoder import IDLE_S, Encoder, _size, cutting_tokens
from engine.tokenizer.tokenizer import Tokenizer
from engine.types import RenderError, RenderInput

TINY = Path(__file__).parents[3] / "engine" / "tiny" / "checkpoint"
TEMPLATES = sorted((Path(__file__).parents[1] / "transcripts").rglob("*.jinja"))


def added(*tokens: AddedToken) -> list[str]:
    return cutting_tokens(tokens)


def test_a_text_is_cut_only_where_nothing_else_decides_about_a_token() -> None:
    def token(content: str, **flags: bool) -> AddedToken:
        return AddedToken(content, **{"normalized": False, "special": True, **flags})

    assert added(token("<s>"), token("</s>")) == ["<s>", "</s>"]
    assert added(token("<s>", lstrip=True), token("<a>", single_word=True)) == []
    assert added(AddedToken("<n>", normalized=True), token("  ")) == []
    assert added(token("<s>"), token("x<s>y")) == ["x<s>y"]  # another may hold it
    assert added(token("<s>"), token("x<")) == ["x<"]  # or begin in front of it, and reach into it
    assert added(token("aa")) == []  # or it may overlap with itself
    assert added(token("<s>"), token("<s>x")) == ["<s>", "<s>x"]  # both begin where the text is cut


def first_word_marked(scheme: str) -> Tokenizer:
    """Sentencepiece's way: a mark for the first word, or for every part; tokens with all kinds of flags."""
    alphabet = [chr(code) for code in range(32, 127)] + ["\u2581", "\n"]
    vocab = {char: at for at, char in enumerate(alphabet)}
    merges = [("\u2581", "h"), ("\u2581h", "i"), ("<", "s"), ("a", "b"), ("b", "c")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Backend(models.BPE(vocab, merges))
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(
        [
            AddedToken("<s>", normalized=False),
            AddedToken("</s>", normalized=False),
            AddedToken("<r>", rstrip=True, normalized=False),
            AddedToken("<l>", lstrip=True, normalized=False),
        ]
    )
    backend.add_tokens([AddedToken("<n>", normalized=True), AddedToken("  ", normalized=False)])
    return Tokenizer(backend)


TOKENIZERS = [
    Tokenizer.load(TINY),
    scripted_tokenizer(None),
    *(first_word_marked(scheme) for scheme in ("first", "always", "never", "prepend")),
]
WORDS = ["<s>", "</s>", "<r>", "<l>", "<n>", "  ", " ", "hi", "ab", "bc", "<", "s>", "\n", "<|im_start|>",
         "<|im_end|>", "user\n", "\u00e9", "<|im_", "start|>", "<tool_call>", "</tool_call>"]  # fmt: skip


@given(st.lists(st.text("<ab|\n", min_size=1, max_size=5), max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_cutting_token_is_one_that_no_other_begins_before_and_ends_in(contents: list[str]) -> None:
    def overlaps(earlier: str, token: str) -> bool:
        tails = [earlier[at:] for at in range(1, len(earlier))]
        return any(tail.startswith(token) or token.startswith(tail) for tail in tails)

    found = cutting_tokens([AddedToken(content, normalized=False) for content in contents])
    assert found == [
        content
        for content in contents
        if not content[0].isspace() and not any(overlaps(each, content) for each in contents)
    ]


def test_thousands_of_added_tokens_are_looked_through_at_once() -> None:
    """Gemma's tokenizers have 6,242; compared with one another they took five minutes."""
    unused = [AddedToken(f"<unused{at}>", normalized=False) for at in range(6242)]
    assert len(cutting_tokens([*unused, AddedToken("<eos>", normalized=False)])) == 6243


@pytest.mark.parametrize("text", ["<" * 40_000, "<unused" * 6_000, "The quick brown fox. " * 2_000])
def test_thousands_of_added_tokens_are_not_looked_for_one_by_one(text: str) -> None:
    """A regex of Python's holds up all other threads; tried one by one, Gemma's tokens took seconds."""
    backend = Backend(models.BPE({chr(code): code for code in range(128)}, []))
    unused = [f"<unused{at}>" for at in range(6242)]
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in (*unused, "<eos>", "[mask]")])
    tokenizer = Tokenizer(backend)
    encoder = Encoder(tokenizer)
    text = f"<unused7><unused77>a[mask]{text}<eos>"
    began = time.thread_time()  # of the processor: other threads do not count
    ids = encoder.encode(text, "a")
    assert time.thread_time() - began < 0.5
    assert tuple(ids) == tuple(tokenizer.encode(text))
    assert len(encoder._parts) == 4


@pytest.mark.parametrize("which", range(len(TOKENIZERS)))
@settings(max_examples=75, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(WORDS), max_size=25).map("".join), max_size=6))
def test_any_text_encodes_as_if_nothing_were_remembered(which: int, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[which]
    encoder = Encoder(tokenizer, max_bytes=20_000)
    for text in [*texts, *texts, "".join(texts)]:
        expected = tuple(tokenizer.encode(text))
        assert tuple(encoder.encode(text, "a")) == expected
        assert tuple(encoder.encode(text, None)) == expected
    assert 0 <= encoder._num_bytes <= 20_000
    assert bool(encoder._parts) == bool(encoder._num_bytes)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
@pytest.mark.parametrize("seed", range(2))
def test_growing_conversations_encode_as_if_nothing_were_remembered(template: Path, seed: int) -> None:
    """Every family's template, histories of all kinds of messages, some cut off and begun anew."""
    drawn, source = random.Random(seed), template.read_text("utf-8")
    dialect = choose_dialect(source)
    for tokenizer in TOKENIZERS[:3]:
        encoder = Encoder(tokenizer)
        messages: list[dict[str, object]] = [{"role": "system", "content": "Be brief."}]
        for turn in range(8):
            said = "".join(drawn.choices(WORDS, k=4))
            messages.append({"role": "user", "content": said})
            inp = RenderInput(
                list(messages), chat_template=source, template_kwargs={"bos_token": "<s>"}, scope="a"
            )
            try:
                text = tokenizer.render(inp, dialect.history)
            except RenderError:
                break
            assert tuple(encoder.encode(text, "a")) == tuple(tokenizer.encode_rendered([text])[0])
            if drawn.random() < 0.3:
                call = {"id": f"c{turn}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": f"c{turn}", "name": "f", "content": said})
            messages.append({"role": "assistant", "content": said, "reasoning_content": "so " + said})
            if drawn.random() < 0.2:
                del messages[1 : drawn.randrange(1, len(messages))]


def test_what_one_scope_said_helps_no_other() -> None:
    encoder = Encoder(TOKENIZERS[0])
    encoder.encode("<|im_start|>user\nhello", "a")
    before = len(encoder._parts)
    encoder.encode("<|im_start|>user\nhello", "a")
    assert len(encoder._parts) == before > 0
    encoder.encode("<|im_start|>user\nhello", "b")
    assert len(encoder._parts) == 2 * before


def test_what_nobody_uses_for_a_while_goes() -> None:
    now = [0.0]
    encoder = Encoder(TOKENIZERS[0], clock=lambda: now[0])
    encoder.encode("<|im_start|>user\nlong ago<|im_end|>", "a")
    now[0] += IDLE_S - 1
    encoder.encode("<|im_start|>user\nused again<|im_end|>", "a")
    now[0] += 2
    encoder.encode("<|im_start|>user\nused again<|im_end|>", "a")
    assert any("long ago" in part for _, part in encoder._parts)
    encoder.encode("<|im_start|>user\nnew<|im_end|>", "a")
    assert {part for _, part in encoder._parts} >= {"<|im_start|>user\nused again", "<|im_start|>user\nnew"}
    assert not any("long ago" in part for _, part in encoder._parts)
    assert encoder._num_bytes == sum(_size(part, kept.ids) for (_, part), kept in encoder._parts.items())
