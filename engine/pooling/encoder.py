"""Computes texts by transformers, in batches of texts of about one length.

This serves every architecture that `AutoModel` and `AutoModelForSequenceClassification` know. The owner that
was served least is next, and its oldest text brings along those of nearly its length, whoever's they are, up
to the tokens of one step.
"""

from __future__ import annotations

import logging
import time
import warnings
from bisect import bisect_left
from collections import OrderedDict
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.core import FairShare
from engine.failures import of_device
from engine.kernels import own_threads, set_threads
from engine.models import F32_BELOW, Checkpoint
from engine.pooling.recipe import Recipe
from engine.pooling.step_size import StepSize
from engine.pooling.texts import Texts
from engine.pooling.values import PoolingConfig
from engine.pooling.vectors import Finish, Pooled
from engine.pooling.work import Begin, Item, Outcome
from engine.types import LoadError, RequestFailed

log = logging.getLogger("antiphon.engine")

WINDOW = 512
"""Texts that are looked at for those of one length."""

ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""The classes of encoders that have a decoder beside them, which `AutoModel` would load too."""


class EncoderWorker:
    """See `work.Worker`."""

    def __init__(self, config: PoolingConfig, recipe: Recipe, texts: Texts, device: torch.device) -> None:
        """Raises LoadError for what transformers cannot load."""
        checkpoint = Checkpoint(recipe.folder)
        self._device = device
        self._recipe = recipe
        self._model, self.vocab_size, hidden, longest = self._load(config, checkpoint)
        self._pad = texts.pad_id
        self._size = StepSize(self._most_tokens(config))
        self._finish = Finish(recipe, device)
        self._queues: OrderedDict[str, OrderedDict[int, Item]] = OrderedDict()
        self._share = FairShare()
        self._owners: dict[int, str] = {}
        self.architecture = type(self._model).__name__
        self.fingerprint = checkpoint.fingerprint() + self._finish.fingerprint
        self.hidden = len(recipe.labels) if recipe.head == "classes" else hidden
        lengths = (recipe.max_length, texts.longest, longest, config.max_model_len)
        self.max_len = min((each for each in lengths if each is not None), default=512)
        self._num_threads = self._threads(config)

    def _load(self, config: PoolingConfig, checkpoint: Checkpoint) -> tuple[nn.Module, int, int, int | None]:
        """The model, how many tokens it knows, the size of their states, and how many it has positions
        for."""
        model = _load_transformer(self._recipe, _dtype(config, checkpoint, self._device), self._device)
        fields = model.config.get_text_config()
        return model, int(fields.vocab_size), int(fields.hidden_size), _positions(model, fields)

    def _most_tokens(self, config: PoolingConfig) -> int:
        """Of a step."""
        return config.max_num_batched_tokens

    def _threads(self, config: PoolingConfig) -> int:
        """Of torch."""
        return config.num_threads or own_threads()

    @property
    def num_waiting(self) -> int:
        """See `Worker.num_waiting`."""
        return len(self._owners)

    def add(self, item: Item) -> None:
        """See `Worker.add`."""
        if item.owner not in self._queues:
            self._share.join(item.owner, self._queues.keys())
            self._queues[item.owner] = OrderedDict()
        self._queues[item.owner][item.handle] = item
        self._owners[item.handle] = item.owner

    def drop(self, handle: int) -> None:
        """See `Worker.drop`."""
        owner = self._owners.pop(handle, None)
        if owner is not None:
            del self._queues[owner][handle]
            if not self._queues[owner]:
                del self._queues[owner]

    def step(self, begin: Begin) -> list[Outcome] | None:
        """See `Worker.step`."""
        if not self._queues:
            return None
        set_threads(self._num_threads)  # another engine may have said otherwise
        batch = self._next_batch()
        for item in batch:
            self.drop(item.handle)
            self._share.charge(item.owner, len(item.text.ids), item.weight)
        begin([item.handle for item in batch])
        began = time.thread_time()
        outcomes = self._compute(batch)
        longest = max(len(item.text.ids) for item in batch)
        self._size.took(len(batch) * longest, time.thread_time() - began)
        return outcomes

    def _next_batch(self) -> list[Item]:
        """The oldest text of the owner whose turn it is, and others of about its length."""
        oldest = next(iter(self._queues[self._share.least(self._queues)].values()))
        each = max(1, WINDOW // len(self._queues))
        window = [item for queue in self._queues.values() for item in islice(queue.values(), each)]
        window.sort(key=lambda item: (len(item.text.ids), item.handle))
        low = bisect_left(
            window, (len(oldest.text.ids), oldest.handle), key=lambda i: (len(i.text.ids), i.handle)
        )
        high, most = low + 1, self._size.tokens
        while True:  # a shorter text costs padding, a longer one makes all others longer
            longest = len(window[high - 1].text.ids)
            if low > 0 and (high - low + 1) * longest <= most:
                low -= 1
            elif high < len(window) and (high - low + 1) * len(window[high].text.ids) <= most:
                high += 1
            else:
                return window[low:high]

    def _compute(self, batch: list[Item]) -> list[Outcome]:
        """The vectors of a batch; where it raises, its halves are computed, down to the one at fault."""
        try:
            return self._vectors(batch)
        except Exception as error:
            if of_device(error) and not isinstance(error, torch.OutOfMemoryError):
                raise
            if len(batch) == 1:
                log.error("a text of %d tokens failed", len(batch[0].text.ids), exc_info=error)
                return [Outcome(batch[0].handle, error=RequestFailed(f"{type(error).__name__}: {error}"))]
        middle = len(batch) // 2
        return self._compute(batch[:middle]) + self._compute(batch[middle:])

    def _vectors(self, batch: list[Item]) -> list[Outcome]:
        rows = self._rows(batch)
        vectors = self._finish(rows, [item.text.raw for item in batch]).cpu().numpy()
        finite = np.isfinite(vectors).all(axis=1).tolist()
        broken = RequestFailed("the model computed numbers that are not finite")
        return [
            Outcome(item.handle, vector) if is_finite else Outcome(item.handle, error=broken)
            for item, vector, is_finite in zip(batch, vectors, finite, strict=True)
        ]

    def _rows(self, batch: list[Item]) -> Tensor:
        """What is pooled of each text, or the logits of its classes, f32 [texts, numbers]."""
        longest = max(len(item.text.ids) for item in batch)
        ids = np.full((len(batch), longest), self._pad, np.int64)
        mask = np.zeros((len(batch), longest), np.int64)
        types = np.zeros((len(batch), longest), np.int64)
        typed = any(item.text.types is not None for item in batch)
        for row, item in enumerate(batch):
            count = len(item.text.ids)
            ids[row, :count], mask[row, :count] = item.text.ids, 1
            if item.text.types is not None:
                types[row, :count] = item.text.types
        given = {"input_ids": self._move(ids), "attention_mask": self._move(mask)}
        if typed:
            given["token_type_ids"] = self._move(types)
        output = self._model(**given)
        if self._recipe.head == "classes":
            logits: Tensor = output.logits
            return logits.float()
        states = output.last_hidden_state.float()
        return torch.stack(
            [self._pool(own[: len(item.text.ids)], item) for own, item in zip(states, batch, strict=True)]
        )

    def _pool(self, states: Tensor, item: Item) -> Tensor:
        pooled = Pooled(self._recipe.modes, item.text.num_prompt)
        pooled.add(states, 0)
        return pooled.result()

    def _move(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _load_transformer(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    kind = recipe.config.get("model_type")
    name = "AutoModelForSequenceClassification" if recipe.head == "classes" else "AutoModel"
    if recipe.head != "classes" and kind in ENCODERS:
        name = ENCODERS[str(kind)]
    elif recipe.config.get("is_encoder_decoder"):
        raise LoadError(f"{recipe.architecture} is an encoder-decoder; of these T5 is served, by its encoder")
    if recipe.head == "yes_no":
        raise LoadError(f"{recipe.architecture} is no reranker that is served natively")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader: Any = getattr(transformers, name)
            model, told = loader.from_pretrained(
                recipe.folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # transformers raises what it likes; one line says what it was
        line = (str(error).strip().splitlines() or [""])[0]
        raise LoadError(
            f"transformers cannot load {recipe.folder}: {type(error).__name__}: {line}"
        ) from error
    missing = sorted(each for each in told["missing_keys"] if "pooler" not in each)
    if missing:
        raise LoadError(
            f"{recipe.folder} lacks weights of {type(model).__name__}: {missing[0]} ({len(missing)} in all)"
        )
    model.config.use_cache = False  # a decoder's keys and values are of no use here
    return model.eval().to(device)


def _dtype(config: PoolingConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    stored = checkpoint.dtype
    if checkpoint.num_parameters < F32_BELOW or (device.type == "cpu" and stored is torch.float16):
        return torch.float32
    return torch.float32 if stored is torch.float64 else stored


def _positions(model: Any, fields: Any) -> int | None:
    """Tokens of the longest text that the model has positions for; None where nothing bounds them."""
    most = getattr(fields, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return None
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(
            getattr(module, "position_embeddings", None), torch.nn.Embedding
        ):
            return most - padding - 1  # positions are counted from behind the padding's
    return most
