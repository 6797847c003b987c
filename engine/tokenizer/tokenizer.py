"""A checkpoint's tokenizer: encodes text, decodes tokens, detokenizes incrementally, and finds the chat
template.

It stands on the Rust `tokenizers` library alone: transformers' tokenizer classes compute the same and take a
second longer to start.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.dialects import History
from engine.tokenizer.chat_template import render_template, variables_of
from engine.tokenizer.escape_reader import escape_reader, looks_in_normalized
from engine.tokenizer.escapes import BREAK, Escapes, control_strings, is_escaped
from engine.tokenizer.foreign import NAMES, read_foreign
from engine.types import LoadError, RenderError, RenderInput

if TYPE_CHECKING:
    from engine.tokenizer.banned_texts import BannedTexts, Vocabulary

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Immutable after `load`; safe to use from several
    threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        allow_special_tokens: bool = False,
    ) -> None:
        """`templates` by name ("default", "tool_use"); `special_tokens` by attribute name, for templates.

        allow_special_tokens: what messages say may become control tokens; without it, that is text.
        """
        backend.no_padding()  # a tokenizer.json may ask for either; neither belongs in a prompt
        backend.no_truncation()
        self._backend = backend
        self.templates = dict(templates or {})
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = backend.get_added_tokens_decoder()
        highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = highest + 1
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)  # characters
        self.added_tokens: tuple[AddedToken, ...] = tuple(added.values())
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._all_tags = frozenset(self._added.values())
        kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        # Sentencepiece decoders drop the space that the encoder put before the first word.
        self.strips_first_space = not self._byte_level and bool(kinds & {"Strip", "Metaspace"})
        self._pieces: dict[frozenset[str], list[str | bytes | None]] = {}
        self.control: frozenset[str] = frozenset()
        if not allow_special_tokens:
            self.control = control_strings(self.added_tokens, self.templates.values())
        normalize = backend.normalizer.normalize_str if looks_in_normalized(backend, self.control) else None
        self.escapes = Escapes(self.control, normalize)

    @classmethod
    def load(
        cls, folder: Path, chat_template: str | None = None, *, allow_special_tokens: bool = False
    ) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and the end-of-turn ids of a
        checkpoint.

        `chat_template` replaces the checkpoint's templates. Raises LoadError when there is no tokenizer.
        """
        config = _read_json(folder / "tokenizer_config.json")
        backend = _load_backend(folder)
        missing = {
            int(token_id): entry
            for token_id, entry in config.get("added_tokens_decoder", {}).items()
            if backend.token_to_id(entry["content"]) is None
        }
        for _, entry in sorted(missing.items()):
            token = AddedToken(**{key: value for key, value in entry.items() if key != "__type"})
            backend.add_special_tokens([token]) if entry.get("special") else backend.add_tokens([token])
        special = {}
        for name in SPECIAL_NAMES:
            value = config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                special[name] = content
        if not config and not (folder / "tokenizer.json").is_file():
            special = {name: token for name, token in NAMES.items() if backend.token_to_id(token) is not None}
        eos: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = _read_json(folder / name).get("eos_token_id")
            eos += value if isinstance(value, list) else [value] if isinstance(value, int) else []
        if "eos_token" in special and (token_id := backend.token_to_id(special["eos_token"])) is not None:
            eos.append(token_id)
        templates = {"default": chat_template} if chat_template else _read_templates(folder, config)
        return cls(
            backend,
            templates=templates,
            special_tokens=special,
            eos_token_ids=eos,
            allow_special_tokens=allow_special_tokens,
        )

    def agrees_with(self, other: Tokenizer) -> bool:
        """Whether every id is the same token to both."""
        return bool(self._backend.get_vocab() == other._backend.get_vocab())

    # -- tokens ----------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; tags and special tokens written in it become their ids."""
        # The batch form gives the interpreter's lock back while it works; with `encode` every stream waits.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts, or parts of them: control tokens where the template wrote them, and
        text where a message did. No special tokens of the tokenizer's own."""
        found: list[list[int]] = [[]] * len(texts)
        for escaped in (False, True):
            picked = [at for at, text in enumerate(texts) if is_escaped(text) is escaped]
            if picked:
                backend = self._reader if escaped else self._backend
                # A break in front of everything parts nothing.
                parts = [texts[at].lstrip(BREAK) for at in picked]
                encoded = backend.encode_batch_fast(parts, add_special_tokens=False)
                for at, each in zip(picked, encoded, strict=True):
                    found[at] = list(each.ids)
        return found

    @cached_property
    def _reader(self) -> Backend:
        return escape_reader(self._backend, self.control)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids: what a Detokenizer streams for them, whole; unknown ids are nothing."""
        tags = frozenset() if skip_special_tokens else self._all_tags
        stream = Detokenizer(self, tags, keep_first_space=False)
        return "".join(map(stream.push, ids)) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, specials included; they need not be whole characters. b"" for an id without
        one."""
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(BYTE_ALPHABET.get(char) or char.encode() for char in token)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        # Any other decoder (sentencepiece's spaces, WordPiece, ...): what the token adds after another one.
        # The probe is a token of its own, so that decoders that treat the first token differently do not
        # touch ours.
        decoder = self._backend.decoder
        if decoder is None:
            return token.encode()
        probe = "x"
        return str(decoder.decode([probe, token]))[len(str(decoder.decode([probe]))) :].encode()

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of added tokens: specials, tags and the like, which no merge of text makes."""
        return frozenset(self._added)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name, e.g. "<|im_end|>"."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def piece(self, token_id: int, tags: frozenset[str]) -> str | bytes:
        """What a token is in a stream where of the special tokens only `tags` show: text, or bytes that are
        not whole characters."""
        if token_id in self._special and self._added[token_id] not in tags:
            return ""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def pieces(self, tags: frozenset[str]) -> list[str | bytes | None]:
        """The table of `piece` by id, filled on first use of each id (150k ids at once would cost 0.1 s of
        start)."""
        table = self._pieces.get(tags)
        if table is None:
            table = self._pieces.setdefault(tags, [None] * self.vocab_size)
        return table

    @property
    def all_tags(self) -> frozenset[str]:
        """All added tokens, special ones included: the tags of a stream that hides nothing."""
        return self._all_tags

    def banning(self, texts: tuple[str, ...]) -> BannedTexts:
        """Which tokens would complete one of some texts. The first call goes through the vocabulary, which
        takes a second where it is large."""
        from engine.tokenizer.banned_texts import banned_texts  # numpy, only where it is needed

        return banned_texts(self._vocabulary, texts)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        from engine.tokenizer.banned_texts import Vocabulary

        hidden = self._special.union(self.eos_token_ids)
        ids = range(self.vocab_size)
        return Vocabulary([b"" if token_id in hidden else self.token_bytes(token_id) for token_id in ids])

    @property
    def serialized(self) -> str:
        """The tokenizer as tokenizer.json text, added tokens included."""
        return str(self._backend.to_str())

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that change when the tokenizer or a template does."""
        digest = blake2b(self.serialized.encode(), digest_size=16)
        rest = [self.templates, self.special_tokens, self.eos_token_ids]
        digest.update(json.dumps(rest, sort_keys=True).encode())
        return digest.digest()

    # -- prompts ---------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The template that messages with tools are rendered by; None when the checkpoint has none."""
        return self.templates.get("tool_use") or self.templates.get("default")

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the templates read and that their caller sets."""
        return frozenset().union(*map(variables_of, self.templates.values()))

    def render(self, inp: RenderInput, history: History = History()) -> str:  # noqa: B008 (frozen)
        """Render messages as transformers' `apply_chat_template` does, with what they say escaped
        (`engine.tokenizer.escapes`); for `encode_rendered`.

        `history` is the form in which the template wants earlier turns (`Dialect.history`).

        `continue_final_message` implies no generation prompt. Raises RenderError when there is no template or
        it refuses the messages.
        """
        return render_template(self.template_of(inp), inp, self.special_tokens, history, self.escapes)

    def template_of(self, inp: RenderInput) -> str:
        """The source of the template that renders an input. Raises RenderError when there is none."""
        if inp.chat_template is not None:
            return inp.chat_template
        if inp.tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        raise RenderError("this model has no chat template: use completions, or name a template")


class Detokenizer:
    """Text of one generation as its tokens come: whole characters only, special tokens hidden but for `tags`.

    Incomplete UTF-8 waits for its rest and becomes U+FFFD where none comes. O(1) a token.
    """

    __slots__ = ("_encoding_errors", "_pending", "_pieces", "_strip", "_tags", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, tags: frozenset[str], *, keep_first_space: bool) -> None:
        """`keep_first_space`: the text goes on from a prompt, so a sentencepiece model's first space belongs
        to it."""
        self._tokenizer = tokenizer
        self._tags = tags
        self._pieces = tokenizer.pieces(tags)
        self._pending = b""
        self._strip = tokenizer.strips_first_space and not keep_first_space
        # The library's decoders differ: byte level gives one U+FFFD per broken sequence, byte fallback one
        # per byte.
        self._encoding_errors = "antiphon-each" if tokenizer._byte_fallback else "replace"

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete, and for hidden and unknown
        ids."""
        try:
            piece = self._pieces[token_id]
        except IndexError:  # an embedding padded beyond the vocabulary
            return ""
        if piece is None:
            piece = self._pieces[token_id] = self._tokenizer.piece(token_id, self._tags)
        if self._pending or piece.__class__ is bytes:
            data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
            text, used = codecs.utf_8_decode(data, self._encoding_errors, False)
            self._pending = data[used:]
        else:
            text = piece  # type: ignore[assignment]
        return self._first(text) if self._strip and text else text

    def flush(self) -> str:
        """What an unfinished character leaves at the end."""
        text = self._pending.decode(errors=self._encoding_errors)
        self._pending = b""
        return self._first(text) if self._strip and text else text

    def _first(self, text: str) -> str:
        self._strip = False
        return text.removeprefix(" ")


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("antiphon-each", _replace_each)


def _byte_alphabet() -> Iterator[tuple[str, bytes]]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py, `bytes_to_unicode`)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    for byte in shown:
        yield chr(byte), bytes([byte])
    for offset, byte in enumerate(hidden):
        yield chr(256 + offset), bytes([byte])


BYTE_ALPHABET = dict(_byte_alphabet())


# ------------------------------------------------------------------------------------------------------------
# Files


def _load_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise LoadError(f"{path} cannot be read: {error}") from error
    if (foreign := read_foreign(folder)) is not None:
        return foreign
    try:  # what else there is, transformers may convert
        from transformers import AutoTokenizer

        backend = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
        assert isinstance(backend, Backend)
        return backend
    except Exception as error:
        raise LoadError(f"{folder} has no tokenizer.json, and none can be made: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LoadError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: chat_template.jinja and additional_chat_templates/ win over
    tokenizer_config.json."""
    found: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        found = {entry["name"]: entry["template"] for entry in listed}
    if (path := folder / "chat_template.jinja").is_file():
        found["default"] = path.read_text(encoding="utf-8")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _decoder_kinds(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    nested = decoder.get("decoders", [])
    return {decoder["type"]}.union(*(_decoder_kinds(inner) for inner in nested))
