"""Notes: taken down by a call, which may not run twice."""

from __future__ import annotations

from tools.spec import ToolError, ToolSpec

MAX_NOTE = 4000  # characters


async def save_note(note: str) -> str:
    """Take a note down. The run's own log is where it is kept: the call's arguments stay in the response."""
    text = note.strip()
    if not text:
        raise ToolError("the note is empty")
    if len(text) > MAX_NOTE:
        raise ToolError(f"a note may have {MAX_NOTE} characters")
    return f"Noted: {text}"


TOOLS = (
    ToolSpec(
        name="save_note",
        description="Save a note.",
        parameters={
            "type": "object",
            "properties": {"note": {"type": "string", "description": "The text of the note."}},
            "required": ["note"],
            "additionalProperties": False,
        },
        run=save_note,
    ),
)
