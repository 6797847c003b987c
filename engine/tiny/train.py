"""Train antiphon-tiny: the tokenizer, then the network, then a Hugging Face folder.

`python -m engine.tiny.train --out DIR --minutes N --seed S --device auto` makes everything from the
curriculum in `engine.tiny.data`. The learning rate follows the clock, so any budget of minutes ends with a
finished model. With `--state FILE` a run that was stopped goes on where it was; with `--init FOLDER` a new
run begins with the weights and the tokenizer of a model that is there already, which may have fewer layers.

On a CPU every core gets a process of its own with one thread, and gradients are averaged once a step: threads
that meet at every small operation cost most of the time where cores are shared.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, Full
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from engine.kernels import multiplies_bfloat16
from engine.tiny.data import MIX, dialogues, families, tokenizer_corpus
from engine.tiny.dialogue import Dialogue, render
from engine.tiny.net import Layout, Net, NetConfig

CHECKPOINT = Path(__file__).with_name("checkpoint")
VOCABULARY = 3072
CONTEXT = 32768
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# A space is a piece of its own, so a word has the same tokens after a space, a quote or a newline: copying is
# then exact repetition of tokens. Digits and newlines stand alone, so joins of text never change the pieces.
PIECES = r"\p{L}[\p{L}\p{M}]*|\p{N}|\n|[^\S\n]+|[^\s\p{L}\p{N}]+"

# ---------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(seed: int, documents: int = 12_000) -> Tokenizer:
    """A byte-level BPE of `VOCABULARY` tokens, learned from the curriculum."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = []
    for text in tokenizer_corpus(seed, documents):
        for mark in (*SPECIAL, *MARKS):
            text = text.replace(mark, "\n")
        corpus.append(text)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return tokenizer


def id_of(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(text)
    if found is None:
        raise KeyError(text)
    return found


@dataclass(frozen=True)
class Document:
    """Token ids, for each whether it is to be learned, and the branch it belongs to: 0 is what all share."""

    ids: list[int]
    learn: list[bool]
    branches: list[int]

    def positions(self) -> np.ndarray:
        """Where each token stands in its own branch: every branch goes on where the shared part ends."""
        branches = np.array(self.branches)
        out = np.arange(len(branches))
        shared = int((branches == 0).sum())
        for branch in range(1, int(branches.max()) + 1):
            own = branches == branch
            out[own] += shared - int(own.argmax())
        return out


def encode(tokenizer: Tokenizer, family: Sequence[Dialogue], longest: int = CONTEXT) -> Document:
    """A dialogue, or several as branches behind the system message they share, up to `longest` tokens."""

    def add(branch: int, pieces: list[tuple[str, bool]]) -> None:
        for text, learned in pieces:
            piece = tokenizer.encode(text, add_special_tokens=False).ids
            document.ids.extend(piece)
            document.learn.extend([learned] * len(piece))
            document.branches.extend([branch] * len(piece))

    document = Document([], [], [])
    if len(family) == 1:
        add(0, render(family[0]))
        return document
    add(0, render(family[0])[:1])
    for branch, dialogue in enumerate(family, 1):
        before = len(document.ids)
        add(branch, render(dialogue)[1:])
        if len(document.ids) > longest:
            for part in (document.ids, document.learn, document.branches):
                del part[before:]
            break
    return document


# ---------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Plan:
    """What the producer of batches needs to know."""

    seed: int
    length: int
    """Tokens of a row."""
    copies: float = 0.0
    leaps: float = 0.0
    long_text: float = 0.0
    max_length: int = 256


def copy_exercise(rng: random.Random, vocabulary: int, end: int) -> Document:
    """Random tokens twice over: the quickest way to grow heads that copy."""
    length = rng.randint(3, 30)
    body = [rng.randrange(vocabulary) for _ in range(length)]
    ids, half = [*body, end, *body, end], length + 1
    return Document(ids, [False] * half + [True] * half, [0] * len(ids))


def leap(rng: random.Random, ids: Sequence[int], start: int) -> np.ndarray:
    """Positions that jump far ahead at the start of a message or two.

    Short dialogues then also show the model the distances of a long context, which it has no time to read.
    """
    positions = np.arange(len(ids))
    starts = [index for index, token in enumerate(ids) if token == start and index]
    room = CONTEXT - len(ids)
    for index in rng.sample(starts, min(len(starts), rng.randint(1, 2))):
        far = int(room ** rng.random())
        positions[index:] += far
        room -= far
    return positions


Row = tuple[np.ndarray, ...]
"""Ids, whether they are learned, documents, branches and positions, each [length]."""
WAITING = 100
"""Documents that wait for a row with room for them."""


def documents(tokenizer: Tokenizer, plan: Plan) -> Iterator[tuple[Document, np.ndarray]]:
    """Documents of at most `plan.max_length` tokens that fit into a row, with their positions, for ever."""
    longest = min(plan.max_length, plan.length)
    rng = random.Random(f"{plan.seed}/documents")
    source = families(plan.seed, plan.long_text)
    start, end = id_of(tokenizer, "<|im_start|>"), id_of(tokenizer, "<|im_end|>")
    while True:
        if rng.random() < plan.copies:
            document = copy_exercise(rng, VOCABULARY - len(SPECIAL) - len(MARKS), end)
        else:
            document = encode(tokenizer, next(source), longest)
        if len(document.ids) > longest or not any(document.learn):
            continue
        leaps = not any(document.branches) and rng.random() < plan.leaps
        yield document, leap(rng, document.ids, start) if leaps else document.positions()


def rows(source: Iterator[tuple[Document, np.ndarray]], length: int) -> Iterator[Row]:
    """Rows of `length` tokens of whole documents, for ever; what is left over is document -1."""
    waiting: list[tuple[Document, np.ndarray]] = []
    while True:
        waiting += [next(source) for _ in range(WAITING - len(waiting))]
        ids, branches, positions = (np.zeros(length, dtype=np.int64) for _ in range(3))
        learn, numbers = np.zeros(length, dtype=np.bool_), np.full(length, -1)
        at, left = 0, []
        for number, (document, where) in enumerate(waiting):
            to = at + len(document.ids)
            if to > length:
                left.append((document, where))
                continue
            ids[at:to], learn[at:to], branches[at:to] = document.ids, document.learn, document.branches
            positions[at:to], numbers[at:to] = where, number
            at = to
        waiting = left
        yield ids, learn, numbers, branches, positions


def planned_rows(tokenizer_json: str, plan: Plan) -> Iterator[Row]:
    """Rows of the curriculum, for ever."""
    return rows(documents(Tokenizer.from_str(tokenizer_json), plan), plan.length)


def produce(source: Callable[[], Iterator[Row]], queue: Any) -> None:
    """The body of the producer process; it ends with its parent."""
    parent = os.getppid()
    queue.cancel_join_thread()
    for row in source():
        while True:
            if os.getppid() != parent:
                return
            try:
                queue.put(row, timeout=5)
                break
            except Full:
                continue


class Feeder:
    """Rows made in a process of their own, so that making them never holds up training.

    source: makes them there; it is pickled on the way.
    """

    def __init__(self, source: Callable[[], Iterator[Row]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.queue: Any = context.Queue(maxsize=48)
        self.process = context.Process(target=produce, args=(source, self.queue), daemon=True)
        self.process.start()

    def next(self, device: torch.device) -> tuple[Tensor, Tensor, Layout]:
        ids, learn, *layout = (torch.from_numpy(array).to(device) for array in self._row())
        return ids, learn, Layout(*layout)

    def _row(self) -> Row:
        """The next row. Raises RuntimeError where the process has ended, which has said why."""
        while True:
            try:
                row: Row = self.queue.get(timeout=5)
                return row
            except Empty:
                if not self.process.is_alive():
                    raise RuntimeError("the process that makes rows has ended") from None

    def close(self) -> None:
        self.process.terminate()
        self.process.join()


# ---------------------------------------------------------------------------------------------- optimisation


def quickest(device: torch.device) -> torch.dtype:
    """What products are computed in: bf16, but float32 on a CPU without instructions for bf16."""
    if device.type == "cpu" and not multiplies_bfloat16():
        return torch.float32
    return torch.bfloat16


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices, for a stack [n, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.to(quickest(stack.device))
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    out: Tensor = x.mT if tall else x
    return out


@dataclass(frozen=True)
class Rank:
    """One of the processes that train together."""

    index: int = 0
    count: int = 1

    @torch.no_grad()
    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.count == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat)
        at = 0
        for tensor in tensors:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()

    def agree(self, value: float) -> float:
        """The first process's value."""
        if self.count == 1:
            return value
        told = torch.tensor(value, dtype=torch.float64)
        distributed.broadcast(told, 0)
        return told.item()


class Muon:
    """Momentum, orthogonalised, for the matrices inside the layers; processes share the work."""

    def __init__(
        self, parameters: Sequence[Tensor], rank: Rank, momentum: float = 0.95, decay: float = 0.02
    ) -> None:
        self.momentum, self.decay, self.rank = momentum, decay, rank
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.buffers = {
            shape: torch.zeros((len(g), *shape), device=g[0].device) for shape, g in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        updates = []
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group if p.grad is not None]).float()
            buffer = self.buffers[shape]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = torch.zeros_like(gradient)
            own = slice(self.rank.index, None, self.rank.count)
            update[own] = orthogonalise(gradient[own].lerp(buffer[own], self.momentum)).float()
            updates.append(update)
        self.rank.sum(updates)
        for (shape, group), update in zip(self.groups.items(), updates, strict=True):
            scale = rate * math.sqrt(max(1.0, shape[0] / shape[1]))
            for parameter, one in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(one, alpha=scale)


def rate_at(progress: float, step: int) -> float:
    """Share of the peak learning rate: a short warm-up, flat, then straight down over the last 50 %."""
    return min(1.0, (step + 1) / 60) * min(1.0, max(0.02, (1 - progress) / 0.5))


def loss_of(
    net: Net, ids: Tensor, learn: Tensor, layout: Layout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(mean loss, which best guesses were right) over the tokens of a row that are to be learned."""
    # Where documents and branches begin, nothing is learned.
    wanted = learn[1:].nonzero().squeeze(1)
    targets = ids[1:][wanted]
    logits = net.logits(net.states(ids, dtype, layout)[wanted])
    return F.cross_entropy(logits, targets), logits.argmax(-1) == targets


@torch.no_grad()
def probe(
    net: Net, tokenizer: Tokenizer, dtype: torch.dtype, device: torch.device, each: int = 24
) -> dict[str, float]:
    """Share of held-out dialogues whose every learned token is the model's first guess, per skill.

    Under greedy decoding that is exactly the share of dialogues the model would have written itself.
    """
    scores = {}
    for skill in MIX:
        source = dialogues(7, "heldout", skill)
        right = 0
        for _ in range(each):
            document = encode(tokenizer, [next(source)])
            ids, learn = (
                torch.tensor(document.ids, device=device),
                torch.tensor(document.learn, device=device),
            )
            _, good = loss_of(net, ids, learn, Layout.plain(len(ids), device), dtype)
            right += bool(good.all())
        scores[skill] = right / each
    return scores


# ---------------------------------------------------------------------------------------------- export


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _configs(net: Net, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder, by their names."""
    ids = {text: id_of(tokenizer, text) for text in (*SPECIAL, *MARKS)}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **net.config.as_dict(),
        "rope_parameters": {"rope_type": "default", "rope_theta": net.config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "torch_dtype": "bfloat16",
    }
    generation = {
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
        "max_new_tokens": 2048,  # as long as its documents: beyond, there is only repetition
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }
    added = {
        str(ids[text]): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in SPECIAL,
        }
        for text in sorted(ids, key=lambda text: ids[text])
    }
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": CONTEXT,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    return {"config": config, "generation_config": generation, "tokenizer_config": tokenizer_config}


def export(net: Net, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder; every file is replaced in one move, the weights last."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "tokenizer.json", tokenizer.to_str(pretty=False))
    for name, value in _configs(net, tokenizer).items():
        write_atomically(out / f"{name}.json", json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    template = out / "chat_template.jinja"
    if template.resolve() != (CHECKPOINT / "chat_template.jinja").resolve():
        shutil.copyfile(CHECKPOINT / "chat_template.jinja", template)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in net.state_dict().items()
    }
    temporary = out / "model.safetensors.new"
    save_file(weights, str(temporary), metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, out / "model.safetensors")


# ---------------------------------------------------------------------------------------------- the run


@dataclass
class Options:
    """The command line, typed."""

    out: Path
    minutes: float
    seed: int
    device: str
    state: Path | None
    init: Path | None
    layers: int
    tokens_per_batch: int
    compile: bool
    rate: float
    processes: int
    save_every: float
    average: bool
    probe: int


def parse() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the Hugging Face checkpoint")
    parser.add_argument("--minutes", type=float, default=80, help="training time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--state", type=Path, default=None, help="file to save to and to resume from")
    parser.add_argument("--init", type=Path, default=None, help="checkpoint folder to begin with")
    parser.add_argument("--layers", type=int, default=NetConfig.num_hidden_layers)
    parser.add_argument("--tokens-per-batch", type=int, default=4224, help="of all processes together")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="prepare the layers by torch.compile, which needs a C++ compiler",
    )
    parser.add_argument("--rate", type=float, default=0.02, help="peak learning rate of the matrices (Muon)")
    parser.add_argument("--processes", type=int, default=2, help="on a CPU; one on a GPU")
    parser.add_argument("--save-every", type=float, default=5, help="minutes between saves")
    parser.add_argument(
        "--average", action="store_true", help="end half-way between --init and what was trained from it"
    )
    parser.add_argument(
        "--probe", type=int, default=24, help="held-out dialogues a skill scored at each save; 0 saves time"
    )
    return Options(**vars(parser.parse_args()))


def phase(progress: float, plan: Plan, fresh: bool) -> tuple[int, Plan]:
    """The stage of the run at `progress`, and what its documents are like."""
    if fresh and progress < 0.2:
        return 1, replace(plan, copies=0.1, long_text=0.02, max_length=256)
    if fresh and progress < 0.5:
        return 2, replace(plan, copies=0.02, leaps=0.1, long_text=0.03, max_length=1024)
    return 3, replace(plan, copies=0.03, leaps=0.2, long_text=0.05, max_length=2048)


def grown(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The same function with more layers: copies between the old ones, whose outputs begin at nothing."""
    prefix = "model.layers."
    old = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith(prefix))
    out = {name: value for name, value in weights.items() if not name.startswith(prefix)}
    sources = [index * old // layers for index in range(layers)]
    for index, source in enumerate(sources):
        for name, value in weights.items():
            if name.startswith(f"{prefix}{source}."):
                added = index > 0 and sources[index - 1] == source
                silent = added and ("o_proj" in name or "down_proj" in name)
                kept = torch.zeros_like(value) if silent else value.clone()
                out[name.replace(f"{prefix}{source}.", f"{prefix}{index}.")] = kept
    return out


def copy_row(
    rng: random.Random, end: int, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor, Layout]:
    """A row of nothing but copy exercises of one length: what the run begins with."""
    length = rng.choice((6, 10, 14, 20, 30))
    shape = (tokens // (2 * length + 2), length)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    body = torch.randint(0, VOCABULARY - len(SPECIAL) - len(MARKS), shape, generator=generator)
    stop = torch.full((shape[0], 1), end)
    ids = torch.cat((body, stop, body, stop), dim=1)
    learn = torch.zeros_like(ids, dtype=torch.bool)
    learn[:, length + 1 :] = True
    count, width = ids.shape
    numbers = torch.arange(count).repeat_interleave(width)
    layout = Layout(numbers, torch.zeros_like(numbers), torch.arange(width).repeat(count))
    spare = (0, tokens - ids.numel())
    layout = Layout(
        F.pad(numbers, spare, value=-1), *(F.pad(x, spare) for x in (layout.branches, layout.positions))
    )
    return F.pad(ids.flatten(), spare).to(device), F.pad(learn.flatten(), spare).to(device), layout.to(device)


def train(options: Options) -> None:
    """Run the whole thing; prints a line now and then."""
    wanted = options.device
    device = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    count = options.processes if device == "cpu" else 1
    if count == 1:
        return run(0, 1, device, options)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    start_processes(run, (count, device, options), nprocs=count)  # type: ignore[no-untyped-call]


def run(index: int, count: int, device_name: str, options: Options) -> None:
    """The body of one of `count` processes; the first one saves and prints."""
    device = torch.device(device_name)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if count > 1:
        distributed.init_process_group("gloo", rank=index, world_size=count)
    torch.manual_seed(options.seed)
    Training(Rank(index, count), device, options).run()
    if count > 1:
        distributed.destroy_process_group()


@dataclass
class Totals:
    """How far a training has come; `spent`: seconds."""

    step: int = 0
    tokens: int = 0
    learned: int = 0
    spent: float = 0.0


class Training:
    """The net, its optimizers and what they are fed, in one of several processes."""

    def __init__(self, rank: Rank, device: torch.device, options: Options) -> None:
        self.rank, self.device, self.options, self.dtype = rank, device, options, quickest(device)
        saved: dict[str, Any] = {}
        if options.state and options.state.exists():
            saved = torch.load(options.state, map_location=device, weights_only=False)
        self.tokenizer = self._tokenizer(saved)
        self.net = Net(
            NetConfig(vocab_size=VOCABULARY, num_hidden_layers=options.layers), options.compile
        ).to(device)
        if options.init and not saved:
            self.net.load_state_dict(grown(load_file(options.init / "model.safetensors"), options.layers))
        matrices = [p for name, p in self.net.named_parameters() if name.endswith("_proj.weight")]
        self.others = [p for name, p in self.net.named_parameters() if not name.endswith("_proj.weight")]
        self.muon = Muon(matrices, rank)
        self.adam = torch.optim.AdamW(self.others, lr=options.rate / 6, betas=(0.9, 0.98), weight_decay=0.0)
        self.totals = Totals()
        if saved:
            self.net.load_state_dict(saved["net"])
            self.adam.load_state_dict(saved["adam"])
            self.muon.buffers = saved["muon"]
            self.totals = Totals(**{name: saved[name] for name in ("step", "tokens", "learned", "spent")})
        self.feeder: Feeder | None = None
        self.stage = -1
        # Dialogues start once the model copies: then everything that is said again costs little to learn.
        self.copied = 0.0 if not options.init and not saved else 1.0
        self.copy_rng = random.Random(f"{options.seed}/{rank.index}")
        self.smooth_loss = 0.0

    def _tokenizer(self, saved: dict[str, Any]) -> Tokenizer:
        if saved:
            return Tokenizer.from_str(saved["tokenizer"])
        if self.options.init:
            return Tokenizer.from_file(str(self.options.init / "tokenizer.json"))
        return train_tokenizer(self.options.seed)

    def run(self) -> None:
        """Train until the minutes are spent, then save."""
        parameters = sum(p.numel() for p in self.net.parameters())
        self._say(f"{parameters:,} parameters on {self.rank.count} {self.device}")
        totals, options = self.totals, self.options
        last_save = last_print = totals.spent
        mark = time.monotonic()
        try:
            while totals.spent < options.minutes * 60:
                factor = self._step(totals.spent / (options.minutes * 60))
                now = time.monotonic()
                # A run that was stopped for a while, with SIGSTOP for instance, has not spent that while.
                totals.spent, mark = self.rank.agree(totals.spent + min(now - mark, 30.0)), now
                if totals.spent - last_print > 20:
                    last_print = totals.spent
                    self._say(
                        f"{totals.spent / 60:6.1f} min  step {totals.step}  {totals.tokens / 1e6:.2f} M "
                        f"tokens  {totals.tokens / totals.spent:.0f} tok/s  loss {self.smooth_loss:.4f}  "
                        f"rate {factor:.2f}"
                    )
                if totals.spent - last_save > options.save_every * 60:
                    last_save = totals.spent
                    self._save()
                    self._score(options.probe)
        finally:
            if self.feeder:
                self.feeder.close()
        self._average()
        self._save()
        self._score(2 * options.probe)
        self._say(
            f"done: {totals.step} steps, {totals.tokens:,} tokens ({totals.learned:,} learned), "
            f"{totals.spent / 60:.1f} minutes"
        )

    def _step(self, progress: float) -> float:
        """One step of training, at this share of the time; returns the factor of the learning rate."""
        rank, totals, options = self.rank, self.totals, self.options
        length = options.tokens_per_batch // rank.count
        copying = self.copied < 0.9 and progress < 0.2
        if copying:
            row = copy_row(self.copy_rng, id_of(self.tokenizer, "<|im_end|>"), length, self.device)
        else:
            row = self._feed(progress, length).next(self.device)
        ids, learn, layout = row
        loss, right = loss_of(self.net, ids, learn, layout, self.dtype)
        (loss / rank.count).backward()  # type: ignore[no-untyped-call]
        rank.sum([p.grad for p in self.net.parameters() if p.grad is not None])
        if copying:
            self.copied = rank.agree(0.8 * self.copied + 0.2 * right.float().mean().item())
        factor = rate_at(progress, totals.step)
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.muon.step(options.rate * factor)
        for group in self.adam.param_groups:
            group["lr"] = options.rate / 6 * factor
        self.adam.step()
        self.net.zero_grad(set_to_none=True)
        totals.step += 1
        totals.tokens += ids.numel() * rank.count
        totals.learned += right.numel() * rank.count
        self.smooth_loss = 0.97 * (self.smooth_loss or loss.item()) + 0.03 * loss.item()
        return factor

    def _feed(self, progress: float, length: int) -> Feeder:
        """The dialogues of the phase that has begun by now."""
        seed = (self.options.seed * 1_000_003 + self.totals.step) * 64 + self.rank.index
        stage, plan = phase(progress, Plan(seed, length), not self.options.init)
        if self.feeder is None or stage != self.stage:
            if self.feeder:
                self.feeder.close()
            self._say(f"        phase {stage} from step {self.totals.step}, copies {self.copied:.2f}")
            self.feeder, self.stage = Feeder(partial(planned_rows, self.tokenizer.to_str(), plan)), stage
        return self.feeder

    def _average(self) -> None:
        """Halfway back to where the training began, where that is asked for.

        Where the curriculum's shares have changed, this keeps what either of the two does well.
        """
        options = self.options
        if options.average and options.init:
            began = grown(load_file(options.init / "model.safetensors"), options.layers)
            with torch.no_grad():
                for name, value in self.net.state_dict().items():
                    value.lerp_(began[name].to(value), 0.5)

    def _say(self, text: str) -> None:
        if self.rank.index == 0:
            print(text, flush=True)

    def _save(self) -> None:
        if self.rank.index:
            return
        options = self.options
        export(self.net, self.tokenizer, options.out)
        if options.state:
            temporary = options.state.with_name(options.state.name + ".new")
            state = {
                "net": self.net.state_dict(),
                "adam": self.adam.state_dict(),
                "muon": self.muon.buffers,
                "tokenizer": self.tokenizer.to_str(),
            }
            torch.save({**state, **asdict(self.totals)}, temporary)
            os.replace(temporary, options.state)

    def _score(self, each: int) -> None:
        if self.rank.index == 0 and each:
            scores = probe(self.net, self.tokenizer, self.dtype, self.device, each)
            self._say("        " + "  ".join(f"{name} {value:.2f}" for name, value in scores.items()))


if __name__ == "__main__":
    train(parse())
