"""Train antiphon-embed: a vector for every word, so that the mean of a text's words says what it is about.

`python -m engine.tiny_embedder.train --teacher FOLDER --pairs FILE --state FOLDER --out FOLDER` learns from a
larger model of sentence-transformers (the teacher) and from pairs of texts that belong together, one JSON
list of two a line (`benchmarks.manuals` makes them):

1. The vocabulary is the teacher's pieces, as far as the texts use them, and the words that they use most.
2. The teacher reads every entry of the vocabulary, and the texts. This takes nearly all of the time; what it
   said is kept in `--state`.
3. The vectors of the vocabulary begin as the teacher's, in as many dimensions as tell most of its vectors
   apart. Then they are moved so that the mean of a text's is near to the teacher's vector of the text, that
   texts are as far from each other as the teacher has them, and that those of a pair find each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

UNKNOWN = "[UNK]"
PIECES = 20_000
"""Of the teacher's vocabulary, at most: those that the texts use most."""

RARE = 3
"""A piece of the teacher's that is used less often is left out, unless it is a single letter."""

HELD_OUT = 1_000
"""Pairs that are not trained on: how often does one find its other among all of them?"""

BATCH, TEMPERATURE = 512, 0.05
FRAMES = (
    *("how do i {}", "how can i {}?", "how to {}", "what is {}?", "what does {} mean", "where do i find {}?"),
    *("which option is for {}?", "is there a way to get {}", "i want {}", "explain {}", "tell me about {}"),
    *("why does {} not work?", "what happens with {}?", "can i use {}", "how does one do this: {}"),
)
"""How people ask for something. What stands around it says nothing: the vector is to be that of the thing."""

FRAMED = 0.4
"""Of the shorter texts of pairs."""

PART = 20_000
"""Texts that the teacher reads before what it said is kept."""

Vectors = np.ndarray[Any, np.dtype[np.float32]]

PASSAGE, SHORT = 160, 48
"""Tokens of the teacher that are read of the longer and of the shorter text of a pair."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--taught", type=int, default=100_000, help="pairs that the teacher reads")
    parser.add_argument("--vocabulary", type=int, default=28_000)
    parser.add_argument("--dimensions", type=int, default=192)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    pairs = [json.loads(line) for line in options.pairs.read_text("utf-8").splitlines()]
    random.Random(0).shuffle(pairs)
    teacher = Teacher(options.teacher)
    tokenizer, counts = make_tokenizer(teacher.tokenizer, pairs, options.vocabulary)
    entries = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    words = teacher.read_once(options.state / "words", [each.removeprefix("##") for each in entries], 16)
    taught = pairs[: HELD_OUT + options.taught]
    short = teacher.read_once(options.state / "short", [pair[0] for pair in taught], SHORT)
    long = teacher.read_once(options.state / "long", [pair[1] for pair in taught], PASSAGE)
    table = train(tokenizer, counts, words, taught, short, long, options)
    save(options.out, tokenizer, table)


class Teacher:
    """A model of sentence-transformers whose vector is the mean of its states, as its folder has it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def read_once(self, kept: Path, texts: Sequence[str], most: int) -> Vectors:
        """A unit vector a text, of its first tokens; those that a file has already are not read again."""
        parts = []
        for at in range(0, len(texts), PART):
            part = texts[at : at + PART]
            digest = hashlib.blake2b("\0".join(part).encode(), digest_size=8).hexdigest()
            file = kept.with_name(f"{kept.name}-{digest}.npy")
            if not file.exists():
                began = time.perf_counter()
                np.save(file, self._read(part, most).astype(np.float16))
                print(f"{file.name} took {time.perf_counter() - began:.0f} s", flush=True)
            parts.append(np.load(file).astype(np.float32))
        return np.concatenate(parts)

    @torch.inference_mode()
    def _read(self, texts: Sequence[str], most: int) -> Vectors:
        self.tokenizer.enable_truncation(most)
        rows = [each.ids for each in self.tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        vectors = np.zeros((len(rows), self._model.config.hidden_size), np.float32)
        for at in range(0, len(order), 64):
            some = order[at : at + 64]
            longest = len(rows[some[-1]])
            ids = torch.tensor([rows[row] + [0] * (longest - len(rows[row])) for row in some])
            mask = torch.tensor([[1] * len(rows[row]) + [0] * (longest - len(rows[row])) for row in some])
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            vectors[some] = F.normalize(means, dim=-1).numpy()
        return vectors


def make_tokenizer(teacher: Tokenizer, pairs: Sequence[Sequence[str]], size: int) -> tuple[Tokenizer, Tensor]:
    """Splits words as the teacher does, with some of its pieces and with frequent words whole; and how often
    the texts have each entry."""
    seen: Counter[str] = Counter()
    for pair in pairs:
        for text in pair:
            normalized = teacher.normalizer.normalize_str(text)
            seen.update(word for word, _ in teacher.pre_tokenizer.pre_tokenize_str(normalized))
    pieces: Counter[str] = Counter()
    teacher.no_truncation()
    distinct = list(seen)
    for word, encoded in zip(distinct, teacher.encode_batch(distinct, add_special_tokens=False), strict=True):
        for piece in encoded.tokens:
            pieces[piece] += seen[word]
    whole = teacher.get_vocab()
    single = [each for each in whole if len(each.removeprefix("##")) == 1 and each.isascii()]
    kept = dict.fromkeys([UNKNOWN, *sorted(single)])
    kept |= dict.fromkeys(each for each, count in pieces.most_common(PIECES) if count >= RARE)
    for word, count in seen.most_common():
        if len(kept) >= size:
            break
        if count >= RARE and len(word) <= 24 and word.isalpha() and word.isascii():
            kept.setdefault(word)
    vocabulary = {entry: number for number, entry in enumerate(list(kept)[:size])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=64))
    tokenizer.normalizer, tokenizer.pre_tokenizer = teacher.normalizer, teacher.pre_tokenizer
    counts = torch.zeros(len(vocabulary))
    for word, encoded in zip(distinct, tokenizer.encode_batch(distinct), strict=True):
        for number in encoded.ids:
            counts[number] += seen[word]
    return tokenizer, counts


def train(
    tokenizer: Tokenizer,
    counts: Tensor,
    words: Any,
    pairs: Sequence[Sequence[str]],
    short: Any,
    long: Any,
    options: argparse.Namespace,
) -> Tensor:
    """The table of vectors."""
    # The directions in which the teacher's vectors of texts differ most, and their mean, which says nothing.
    mean = torch.from_numpy(long.mean(0))
    _, _, directions = torch.linalg.svd(torch.from_numpy(long[:20_000]) - mean, full_matrices=False)
    basis = directions[: options.dimensions].T

    def reduced(vectors: Any) -> Tensor:
        return F.normalize((torch.from_numpy(vectors) - mean) @ basis, dim=-1)

    share = counts / counts.sum()
    weight = 1e-3 / (1e-3 + share)
    # What is not known, entry 0, says nothing.
    table = torch.nn.EmbeddingBag(len(counts), options.dimensions, mode="mean", padding_idx=0)
    with torch.no_grad():
        table.weight.copy_(reduced(words) * weight[:, None])
        table.weight[0] = 0
    texts = [
        [each.ids or [0] for each in tokenizer.encode_batch([pair[side] for pair in pairs])]
        for side in (0, 1)
    ]
    told = [reduced(short), reduced(long)]
    optimizer = torch.optim.Adam(table.parameters(), lr=options.rate)
    chance = np.random.default_rng(options.seed)
    steps = options.epochs * ((len(pairs) - HELD_OUT) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=steps, pct_start=0.05)

    frames = [[each.ids for each in tokenizer.encode_batch(frame.split("{}"))] for frame in FRAMES]

    def framed(ids: list[int]) -> list[int]:
        before, behind = frames[chance.integers(len(frames))]
        return [*before, *ids, *behind] if chance.random() < FRAMED else ids

    def embed(side: int, rows: Any, *, asked: bool = False) -> Tensor:
        some = [framed(texts[side][row]) if asked else texts[side][row] for row in rows]
        ids = [torch.tensor(each) for each in some]
        offsets = torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)
        return F.normalize(table(torch.cat(ids), offsets), dim=-1)

    def show(when: str) -> None:
        with torch.no_grad():
            rows = range(HELD_OUT)
            one, other = embed(0, rows), embed(1, rows)
            found = (one @ other.T).argsort(dim=1, descending=True)
            rank = (found == torch.arange(HELD_OUT)[:, None]).float().argmax(1)
            near = float((other * told[1][:HELD_OUT]).sum(1).mean())
        first, ten = float((rank == 0).float().mean()), float((rank < 10).float().mean())
        print(f"{when}: first {first:.1%}, in ten {ten:.1%}; to the teacher {near:.3f}", flush=True)

    show("before")
    for epoch in range(options.epochs):
        order = HELD_OUT + chance.permutation(len(pairs) - HELD_OUT)
        for at in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[at : at + BATCH]
            one, other = embed(0, rows, asked=True), embed(1, rows)
            to_one, to_other = told[0][rows], told[1][rows]
            near = 2 - (one * to_one).sum(1).mean() - (other * to_other).sum(1).mean()
            scores = one @ other.T / TEMPERATURE
            wanted = F.softmax(to_one @ to_other.T / TEMPERATURE, dim=1)
            alike = F.kl_div(F.log_softmax(scores, dim=1), wanted, reduction="batchmean")
            target = torch.arange(BATCH)
            found = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
            loss = near + alike + found
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        show(f"epoch {epoch + 1}")
    return table.weight.detach()


def save(out: Path, tokenizer: Tokenizer, table: Tensor) -> None:
    """A folder of sentence-transformers."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    save_file({"embedding.weight": table.to(torch.float16).contiguous()}, out / "model.safetensors")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (out / "modules.json").write_text(json.dumps(modules, indent=1) + "\n")


if __name__ == "__main__":
    main()
