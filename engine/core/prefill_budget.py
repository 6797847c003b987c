"""Limits how many prompt tokens a step computes.

The limit follows from how long recent steps took. While other sequences decode, a step with prompt tokens is
to take little longer than one without. Where nothing decodes, it is to end soon all the same, since whoever
comes meanwhile waits for its end: a token of a long prompt takes the longer the more stand before it.
"""

from __future__ import annotations

import statistics
from collections import deque

STRETCH = 1.0  # of a decode step's time that one prompt may add to it
FIRST = 64  # prompt tokens of the first such step, when nothing is known
LEAST = 8  # prompts go on, whatever it takes
UNFELT = 32  # prompt tokens that a step always has if they take no more than `UNFELT_S`
UNFELT_S = 0.02  # of one more token's wait, which a reader does not feel, however short the step
GROWTH = 1.5  # beyond what steps have lately had, at most
SMALLER = 0.6  # of it in every other step: steps of one size would not tell what a token costs
NUM_PLAIN = 15  # decode steps whose median counts
FRESH = 32  # steps with prompt tokens, behind which comes one without, so that its time is known
CHANGED = 1.3  # times its former time, or one part of that: the decode steps before it count no more
MOST_S = 1.0  # what the prompts of any step may take, at most
SOON_S = 0.5  # and at least, since whoever comes meanwhile waits for the end of a step
READS = 16  # times a decode step's time, between these; with less, weights and old keys are read too often
ENOUGH_S = 0.1  # what prompts of a step take, at least, before it is done without the next one
LEAST_WHOLE = 128  # prompt tokens of such a step, whatever they take; fewer tell little of what a token takes
NUM_WHOLE = 3  # such steps whose median counts
MEMORY = 0.92  # weight of what was learnt before one more step


class Pace:
    """Learns step by step that prompt tokens, in a step with decodes, take `fixed + cost * count` seconds.

    While that is little compared with a decode step, a prompt gets as many tokens as stretch the step by
    `STRETCH`, and several prompts more, so that they do not pile up. Where the fixed part alone is more (a
    step that is no graph, say), small pieces would only pay it more often: then they get as many as take as
    long again.
    """

    def __init__(self, most: int) -> None:
        """most: prompt tokens of a step, at most."""
        self._most = most
        self.most = most  # prompt tokens of the next step, whoever decodes
        self.enough = most  # with so many of them it is done without another prompt
        self._latest: deque[float] = deque(maxlen=NUM_PLAIN)
        self._each: deque[float] = deque(maxlen=NUM_WHOLE)  # seconds a token of prompts in large pieces
        self._since = 0  # steps with prompt tokens since the latest one of decodes alone
        self._plain = 0.0  # seconds of a step without prompt tokens
        self._fixed = self._cost = 0.0
        self._largest = min(FIRST / GROWTH, most)  # of late
        self._smaller = False
        self._weight = self._count = self._count2 = self._extra = self._product = 0.0  # sums that fade

    def allowance(self, num_prompts: int, num_decodes: int) -> int:
        """Prompt tokens of the next step, if so many prompts wait for theirs beside so many sequences that
        decode. Each of them waits for all of them, so each counts as often as there are; and where more wait
        than would be held up, holding up costs less than waiting. 0 where there was no decode step of late.
        """
        if self._since >= FRESH:
            return 0
        urgency = num_prompts * max(1.0, num_prompts / max(1, num_decodes))
        plain = self._plain or self._fixed  # which holds the time of the decodes while that is not known
        room = max(STRETCH * num_prompts * urgency * plain - self._fixed, self._fixed)
        wanted = GROWTH * self._largest * urgency
        least = UNFELT
        if self._cost > 0:
            wanted = min(room / self._cost, wanted)
            least = max(LEAST, min(UNFELT, int(UNFELT_S / self._cost)))
        if self._smaller:
            wanted *= SMALLER
        return min(self._most, max(least, round(wanted)))

    def took_alone(self, num_tokens: int, seconds: float) -> None:
        """Prompts took so long for so many tokens, in a step in which nothing decodes."""
        if num_tokens < LEAST_WHOLE:
            return
        self._each.append(seconds / num_tokens)
        each = statistics.median(self._each)  # 0: beside decodes they cost nothing
        self.most = self._within(self._most_s(), each)
        self.enough = self._within(ENOUGH_S, each)

    def _within(self, seconds: float, each: float) -> int:
        """Tokens of a step's prompts that take so long, where one takes `each`."""
        return min(self._most, max(LEAST_WHOLE, int(seconds / each))) if each else self._most

    def _most_s(self) -> float:
        """What the prompts of a step may take. A decode step takes about as long as reading the weights."""
        if not self._latest:
            return MOST_S
        return min(MOST_S, max(SOON_S, READS * statistics.median(self._latest)))

    @property
    def plain_s(self) -> float:
        """Seconds of a step in which nothing but decodes is computed; 0: not known."""
        return self._plain

    def took(self, num_prompt: int, seconds: float) -> None:
        """A step with decodes took so long; `num_prompt` of its tokens were of prompts."""
        if num_prompt == 0:
            if self._since >= FRESH and not CHANGED > seconds / (self._plain or seconds) > 1 / CHANGED:
                self._latest.clear()  # others decode by now, fewer or more
            self._since = 0
            self._latest.append(seconds)
            return
        self._since += 1
        self._smaller = not self._smaller
        self._largest = max(num_prompt, MEMORY * self._largest)
        if self._latest:
            self._plain = statistics.median(self._latest)
        extra = max(0.0, seconds - self._plain)
        self._learn(num_prompt, extra)
        self.took_alone(num_prompt, extra)  # about as long as they would have taken alone

    def _learn(self, count: int, extra: float) -> None:
        """A straight line through the latest steps, by least squares."""
        if self._weight:  # a step that something else held up teaches little
            extra = min(extra, 2 * max(self._plain, self._fixed + self._cost * count))
        self._weight = MEMORY * self._weight + 1
        self._count = MEMORY * self._count + count
        self._count2 = MEMORY * self._count2 + count**2
        self._extra = MEMORY * self._extra + extra
        self._product = MEMORY * self._product + count * extra
        mean, typical = self._extra / self._weight, self._count / self._weight
        spread = self._count2 / self._weight - typical**2
        if spread > (0.1 * typical) ** 2:
            self._cost = (self._product / self._weight - typical * mean) / spread
        elif not self._cost:
            self._cost = mean / typical
        self._fixed = mean - self._cost * typical
