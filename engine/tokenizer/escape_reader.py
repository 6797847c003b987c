"""Makes the tokenizer that reads rendered prompts with escapes (see `engine.tokenizer.escapes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.tokenizer.escapes import BREAK, QUOTE, QUOTED


def escape_reader(backend: Backend, control: frozenset[str]) -> Backend:
    """A tokenizer that gives a text with escapes the ids of the text that they stand for, without control
    tokens where there are breaks; and any other text the ids that `backend` gives it.

    Added tokens are looked for in the text as it is, before the normalizer, which then takes the breaks out.
    Where that is too early (the tokenizer looks for tokens in normalized text, or has their texts in its
    vocabulary and would merge them), breaks part words instead.
    """
    normalizer = backend.normalizer
    quotes = [normalizers.Replace(quoted, char) for quoted, char in QUOTED.items()]
    if not looks_in_normalized(backend, control):
        found = _twin(backend)
        found.normalizer = _in_turn(normalizers.Sequence, normalizers.Replace(BREAK, ""), *quotes, normalizer)
        if not _merges(found, control):
            return found
    found = _twin(backend)
    quotes[0] = normalizers.Replace(QUOTE + "0", "\ufffd")  # a break would be taken out
    found.normalizer = _in_turn(normalizers.Sequence, *quotes, normalizer)
    parting = pre_tokenizers.Split(Regex(BREAK), "removed")
    found.pre_tokenizer = _in_turn(pre_tokenizers.Sequence, parting, backend.pre_tokenizer)
    return found


def looks_in_normalized(backend: Backend, control: frozenset[str]) -> bool:
    """Whether a tokenizer changes a text before it looks for some of its control tokens."""
    added = backend.get_added_tokens_decoder().values()
    return backend.normalizer is not None and any(
        token.normalized for token in added if token.content in control
    )


def _twin(backend: Backend) -> Backend:
    """A tokenizer with the same ids, which shares the model in memory."""
    added = backend.get_added_tokens_decoder()
    tokens = []
    for _, known in sorted(added.items()):
        flags = {name: getattr(known, name) for name in ("single_word", "lstrip", "rstrip", "special")}
        # Without a normalizer the flag means nothing; beside one that takes out breaks it would.
        normalized = known.normalized and backend.normalizer is not None
        tokens.append(AddedToken(known.content, normalized=normalized, **flags))
    found = Backend(backend.model)
    found.add_tokens(tokens)
    # The library numbers added tokens in their order, also when it reads them from a file.
    assert found.get_added_tokens_decoder().keys() == added.keys()
    found.pre_tokenizer = backend.pre_tokenizer
    return found


def _merges(backend: Backend, control: Iterable[str]) -> bool:
    """Whether the model has a control token in its vocabulary and makes it of a broken text."""
    known = [text for text in control if backend.model.token_to_id(text) is not None]
    unknown = set(backend.encode("\U0010fffd", add_special_tokens=False).ids)
    ids = {backend.token_to_id(text) for text in known} - unknown
    broken = [text[0] + BREAK + text[1:] for text in known]
    tried = [around.format(text) for text in broken for around in ("{}", " {} ", "a{}a", "\n{}\n")]
    found = backend.encode_batch_fast(tried, add_special_tokens=False)
    return any(not ids.isdisjoint(each.ids) for each in found)


def _in_turn(sequence: Callable[[list[Any]], Any], *parts: Any) -> Any:
    return sequence([part for part in parts if part is not None])
