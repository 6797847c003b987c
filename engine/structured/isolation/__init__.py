"""Foreign grammars in processes of their own.

Owns the trial of every constraint, the processes that step grammars, and what becomes of one that dies.
"""

from __future__ import annotations

from engine.structured.isolation.constraints import Constraints, Grammar, Matcher, Move, Stepper

__all__ = ["Constraints", "Grammar", "Matcher", "Move", "Stepper"]
