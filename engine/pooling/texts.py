"""Turns texts, and pairs of texts, into token ids as the checkpoint's own tokenizer does."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.pooling.recipe import Recipe
from engine.pooling.word_memo import WordMemo, encode_alone, treats_words_apart
from engine.types import LoadError, RenderError

JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The template of Qwen3-Reranker, and what it is told where a request says nothing."""

Words = str | tuple[str, str] | Sequence[int]
"""A text, a pair of texts (a query and a document), or token ids, which are taken as they are."""


@dataclass(frozen=True, slots=True)
class TextInput:
    """One text as the model takes it. types: which text of a pair each token is of, for models that are told.
    num_prompt: tokens at the beginning that a prompt brought and that are not pooled. raw: its vector is
    given as it is before it is brought to the length 1, its scores before the activation."""

    ids: NDArray[np.int32]
    types: NDArray[np.int32] | None = None
    num_prompt: int = 0
    raw: bool = False


class Texts:
    """A checkpoint's tokenizer. Not thread-safe."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises LoadError where transformers has no tokenizer for the folder."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self._recipe = recipe
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if recipe.head == "table":  # its folder has this file alone
                    alone: Any = PreTrainedTokenizerFast
                    self._tokenizer: Any = alone(tokenizer_file=str(recipe.folder / "tokenizer.json"))
                else:
                    load: Any = AutoTokenizer.from_pretrained
                    self._tokenizer = load(recipe.folder, local_files_only=True)
        except Exception as error:  # transformers raises what it likes; one line says what it was
            line = (str(error).strip().splitlines() or [""])[0]
            raise LoadError(f"the tokenizer of {recipe.folder} cannot be loaded: {line}") from error
        if recipe.lower_case:
            _lower_case(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder.values()
        control = {*self._tokenizer.all_special_tokens, *(str(each) for each in added if each.special)}
        self._control = sorted(control, key=len, reverse=True)
        self._prompt_lengths: dict[str, int] = {}
        self._yes_no = recipe.yes_no
        if self._tokenizer.chat_template and not recipe.plain and recipe.causal:
            what = "a query and a document are" if recipe.kind == "rerank" else "a text is"
            raise LoadError(
                f"{recipe.folder} has a chat template and no modules.json: nothing says how {what} told to it"
            )
        self._memo: WordMemo | None = None
        if recipe.head == "table" and treats_words_apart(self._tokenizer.backend_tokenizer):
            self._memo = WordMemo(self._tokenizer.backend_tokenizer)
        self._around: tuple[list[int], list[int]] = ([], [])
        if recipe.head == "yes_no":
            self._around = self._plain(JUDGE), self._plain(ANSWER)
            self._yes_no = recipe.yes_no or self._find_yes_no()
        if recipe.chat is not None:
            try:
                shown = self._rendered("<the query>", "<the document>", "")
            except RenderError as error:
                raise LoadError(f"the chat template of {recipe.folder} fails: {error}") from None
            if "<the query>" not in shown or "<the document>" not in shown:
                raise LoadError(f"the chat template of {recipe.folder} does not show a query and a document")

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def pad_id(self) -> int:
        """What shorter texts of a batch are filled with."""
        found = self._tokenizer.pad_token_id
        return int(found) if found is not None else 0

    @property
    def longest(self) -> int | None:
        """Tokens that the tokenizer's own configuration says a text may have."""
        told = self._tokenizer.model_max_length
        return int(told) if told < 10**9 else None

    @property
    def yes_no(self) -> tuple[int, int]:
        """Token ids of a reranker's two answers."""
        assert self._yes_no is not None
        return self._yes_no

    def fingerprint(self) -> bytes:
        """The same for every copy of the tokenizer."""
        digest = hashlib.blake2b(digest_size=16)
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "sentencepiece.bpe.model"):
            path: Path = self._recipe.folder / name
            digest.update(path.read_bytes() if path.exists() else b"-")
        return digest.digest()

    def encode(self, words: Words, *, prompt: str = "", cut: int | None = None) -> TextInput:
        """Token ids with those that the tokenizer adds. prompt: stands before the text; before a pair, with a
        reranker that is instructed, it is the instruction. cut: a longer text is cut to so many tokens, at
        its end; of a pair the longer text is cut. Raises RenderError for a text that no tokenizer takes, or
        that the chat template refuses.

        A control token that a pair spells is text: a document must not end the model's question about it.
        Elsewhere it is the token, as with sentence-transformers, because prompts of some models need it.
        """
        try:
            if isinstance(words, str):
                return self._encoded(words, None, prompt, cut)
            first, *rest = words
            if not isinstance(first, str):
                return TextInput(np.array(words, np.int32)[:cut])
            second = str(rest[0])
            if self._recipe.chat is not None:
                return self._told(first, second, prompt, cut)
            if self._recipe.head == "yes_no":
                return self._judged(first, second, prompt or INSTRUCTION, cut)
            return self._encoded(first, second, prompt, cut)
        except (UnicodeError, TypeError) as error:
            raise RenderError(f"the text cannot be read: {error}") from None

    def _encoded(self, first: str, second: str | None, prompt: str, cut: int | None) -> TextInput:
        if self._memo is not None:
            return TextInput(self._memo.encode(prompt + first)[:cut])
        if self._recipe.head == "table":
            return TextInput(encode_alone(self._tokenizer.backend_tokenizer, prompt + first)[:cut])
        length = {"truncation": "longest_first", "max_length": cut} if cut is not None else {}
        found = self._tokenizer(
            prompt + first,
            second,
            return_attention_mask=False,
            split_special_tokens=second is not None,
            verbose=False,
            **(length or {"truncation": False}),
        )
        types = found.get("token_type_ids")
        skip = 0 if self._recipe.include_prompt or not prompt else self._prompt_length(prompt)
        return TextInput(
            np.array(found["input_ids"], np.int32), None if types is None else np.array(types, np.int32), skip
        )

    def _judged(self, query: str, document: str, instruction: str, cut: int | None) -> TextInput:
        before, after = self._around
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = self._plain(text, split=True)
        if cut is not None:
            ids = ids[: max(0, cut - len(before) - len(after))]
        return TextInput(np.array([*before, *ids, *after], np.int32))

    def _told(self, query: str, document: str, instruction: str, cut: int | None) -> TextInput:
        """A pair by the chat template; to cut it, its document is cut."""
        ids = self._plain(self._rendered(query, document, instruction))
        if cut is not None and len(ids) > cut:
            known = self._plain(document)
            kept: str = self._tokenizer.decode(known[: max(0, len(known) - (len(ids) - cut))])
            ids = self._plain(self._rendered(query, kept, instruction))
        return TextInput(np.array(ids, np.int32))

    def _rendered(self, query: str, document: str, instruction: str) -> str:
        chat = self._recipe.chat
        assert chat is not None
        said = self._harmless(instruction) or chat.instruction
        rows = [*([("system", said)] if said else [])]
        rows += [("query", self._harmless(query)), ("document", self._harmless(document))]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if chat.structured else text}
            for role, text in rows
        ]
        try:
            render: Any = self._tokenizer.apply_chat_template
            text: str = render(messages, tokenize=False, **chat.variables)
        except Exception as error:  # templates raise what they like
            raise RenderError(f"the chat template cannot show this: {error}") from None
        return text

    def _plain(self, text: str, *, split: bool = False) -> list[int]:
        """Tokens of a text alone; split: the names of control tokens in it are text."""
        found: list[int] = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=split, verbose=False
        )["input_ids"]
        return found

    def _harmless(self, text: str) -> str:
        """A text in which the names of control tokens are broken up, so that they are text in a template."""
        for name in self._control:
            text = text.replace(name, f"{name[:1]} {name[1:]}")
        return text

    def _prompt_length(self, prompt: str) -> int:
        """Tokens of a prompt, without the special one that ends every text."""
        if prompt not in self._prompt_lengths:
            ids = self._tokenizer(prompt, verbose=False)["input_ids"]
            self._prompt_lengths[prompt] = len(ids) - (
                ids[-1:] != [] and ids[-1] in self._tokenizer.all_special_ids
            )
        return self._prompt_lengths[prompt]

    def _find_yes_no(self) -> tuple[int, int]:
        known = self._tokenizer.get_vocab()
        if "yes" not in known or "no" not in known:
            raise LoadError(f"the tokenizer of {self._recipe.folder} has no tokens 'yes' and 'no'")
        return known["yes"], known["no"]


def _lower_case(tokenizer: Any) -> None:
    """Have the tokenizer make every text small letters, as `do_lower_case` of sentence-transformers says."""
    from tokenizers.normalizers import Lowercase, Sequence

    backend = tokenizer.backend_tokenizer
    steps: list[Any] = [Lowercase()]
    if backend.normalizer is not None:
        steps.append(backend.normalizer)
    backend.normalizer = Sequence(steps)
