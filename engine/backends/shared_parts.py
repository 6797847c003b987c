"""What several engines have in common: the texts of a tokenizer, and that no KV is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from engine.types import GenerateRequest, Prompt, RenderInput

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from engine.tokenizer import Prompts

T = TypeVar("T")


class WithTexts:
    """The part of an `Engine` that its tokenizer does in this process, once there is one, and the threads in
    which it does what is much."""

    _prompts: Prompts
    _pool: ThreadPoolExecutor

    async def render(self, messages: RenderInput) -> Prompt:
        """See `Engine.render`."""
        return await self._prompts.render(messages)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, owner: str = ""
    ) -> tuple[int, ...]:
        """See `Engine.tokenize`."""
        return await self._prompts.tokenize(text, add_special_tokens=add_special_tokens, owner=owner)

    async def detokenize(self, token_ids: Sequence[int], *, owner: str = "") -> str:
        """See `Engine.detokenize`."""
        return await self._prompts.detokenize(token_ids, owner=owner)

    def token_text(self, token_id: int) -> str:
        """See `Engine.token_text`."""
        return self._prompts.token_text(token_id)

    async def _beside(self, much: bool, work: Callable[[], T]) -> T:
        """Do some work, in a thread when it is much."""
        return await self._in_pool(work) if much else work()

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


class WithoutKV:
    """The part of an `Engine` for those that have no KV to keep, or no word for it on their wire."""

    def keep(self, name: str, request: GenerateRequest, output: Sequence[int], seconds: float) -> None:
        """Nothing: there is none."""

    def let_go(self, name: str) -> None:
        """Nothing was kept."""

    def save(
        self, name: str, request: GenerateRequest, output: Sequence[int], until: float | None = None
    ) -> None:
        """Nothing: there is none."""

    def forget(self, names: Collection[str]) -> None:
        """Nothing was saved."""

    def forget_owner(self, owner: str) -> None:
        """Nothing was saved."""

    async def saved_names(self) -> frozenset[str]:
        """None."""
        return frozenset()
