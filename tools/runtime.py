"""Runs a tool: takes the arguments as the model wrote them and returns a result, whatever happens.

Arguments are checked and time is limited. The one broad `except` keeps a tool's fault from ending a run:
every failure becomes an error that the model can read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from dataclasses import replace

from tools.arguments import parse_arguments
from tools.encodings import well_formed
from tools.spec import ToolError, ToolResult, ToolSpec

log = logging.getLogger("antiphon.tools")

UNKNOWN_EFFECT = "Whether it had any effect is not known."
"""What the model is told besides of a call that was cut short and must not simply be made again."""

MAX_OUTPUT = 256 * 1024
"""Characters of a tool's output that are kept. The model is shown fewer where its context has no room."""

_NOTE = re.compile(r"\n\[cut: the output had (\d+) characters\]$")


async def execute(spec: ToolSpec, arguments: str) -> ToolResult:
    """Run a tool with the JSON text of its arguments. Never raises, except when it is cancelled."""
    try:
        given = parse_arguments(spec, arguments)
        async with asyncio.timeout(spec.timeout_s):
            output = await spec.run(**given)
    except ToolError as exc:
        failed = shortened(ToolResult(error=str(exc), uncertain=exc.uncertain, fault=exc.fault))
        return with_doubt(failed, repeatable=spec.idempotent)
    except TimeoutError:
        end = "was stopped" if spec.stops else "may still go on; nobody waits for it any more"
        late = f"took longer than {spec.timeout_s:g} s"
        failed = ToolResult(error=f"{spec.name} {late} and {end}", uncertain=True, fault=late)
        return with_doubt(failed, repeatable=spec.idempotent)
    except Exception as exc:
        _log(spec, exc)
        failed = ToolResult(error=f"{spec.name} failed: {type(exc).__name__}", uncertain=True)
        return with_doubt(failed, repeatable=spec.idempotent)
    return shortened(output if isinstance(output, ToolResult) else ToolResult(output=output))


def _log(spec: ToolSpec, exc: Exception) -> None:
    """Say where a tool failed. What an exception says may hold arguments and secrets of the tool, and is
    logged for those who look for faults in it."""
    frames = traceback.extract_tb(exc.__traceback__)
    places = ", ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
    debugging = log.isEnabledFor(logging.DEBUG)
    log.error("tool %s failed: %s at %s", spec.name, type(exc).__name__, places, exc_info=debugging)


def with_doubt(result: ToolResult, *, repeatable: bool) -> ToolResult:
    """A result that says so where nobody knows whether the call had an effect. repeatable: the call may be
    made twice, so that the model need not know."""
    if repeatable or not result.uncertain:
        return result
    error = (result.error or "").rstrip(".")
    return replace(result, error=f"{error}. {UNKNOWN_EFFECT}")


def shortened(result: ToolResult) -> ToolResult:
    """A result of well-formed text with no more than MAX_OUTPUT characters, and a note where it had more."""
    if result.output is not None:
        return replace(result, output=cut(well_formed(result.output), MAX_OUTPUT))
    return (
        result if result.error is None else replace(result, error=cut(well_formed(result.error), MAX_OUTPUT))
    )


def cut_note(length: int | str) -> str:
    """What ends an output of which only a part is kept. length: characters that it had."""
    return f"\n[cut: the output had {length} characters]"


def cut(text: str, most: int) -> str:
    """A tool's output, or its first `most` characters with a note that says how many there were: also in an
    output that such a note ends already."""
    if len(text) <= most:
        return text
    noted = _NOTE.search(text[-80:])
    length = len(text) if noted is None else noted.group(1)
    return f"{text[:most]}{cut_note(length)}"
