"""Reads `tekken.json`, in which Mistral's own tools keep a tokenizer, for the `tokenizers` library.

The file has the bytes of tokens in the order of their ranks, a pattern that cuts texts into words, and
control tokens, whose ids come first. A pair of tokens is joined where both together are a token, the lowest
rank first, so the ranks say all that a list of merges would.
"""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine.types import LoadError

FILE = "tekken.json"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""What templates call control tokens."""


def read_tekken(path: Path) -> Backend:
    """The tokenizer of a file. Raises LoadError for one that is damaged, or of another kind."""
    try:
        file = json.loads(path.read_text("utf-8"))
        return _backend(file)
    except LoadError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise LoadError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _backend(file: dict[str, Any]) -> Backend:
    config = file["config"]
    num_control = int(config["default_num_special_tokens"])
    control = _control(file, num_control)
    num_tokens = int(config["default_vocab_size"]) - num_control
    tokens = [b64decode(entry["token_bytes"]) for entry in file["vocab"][:num_tokens]]
    if [int(entry["rank"]) for entry in file["vocab"][:num_tokens]] != list(range(len(tokens))):
        raise LoadError("the tokens of tekken.json are not in the order of their ranks")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise LoadError(f"tekken.json has no token for the byte {missing[0]}")
    letters = _letters()

    def shown(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {shown(token): num_control + rank for rank, token in enumerate(tokens)}
    vocab |= {token: id for id, token in enumerate(control)}
    merges = [
        (shown(token[:at]), shown(token[at:]))
        for token in tokens
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    backend = Backend(BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    if (bos := backend.token_to_id(NAMES["bos_token"])) is not None:
        bos_token = NAMES["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, bos)]
        )
    return backend


def _control(file: dict[str, Any], number: int) -> list[str]:
    """The control tokens by their ids; older files name none, and then they are Mistral's first ones."""
    listed = file.get("special_tokens")
    if listed is None:
        listed = [{"rank": rank, "token_str": token} for rank, token in enumerate(_FIRST)]
    named = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    return [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(number)]


_FIRST = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def _letters() -> list[str]:
    """The letter that byte-level vocabularies write for each byte: itself where it can be seen, else one from
    256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(hidden)) for byte in range(256)]
