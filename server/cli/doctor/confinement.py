"""What strangers' bytes and programs run in."""

from __future__ import annotations

import sys

from server.cli.doctor.findings import Finding
from server.config import Config
from tools import UnreadableDocument, read_document, reading_confinement, unreadable_kinds


async def check_documents(config: Config) -> Finding:
    try:
        await read_document(b"text", "text.txt")
    except UnreadableDocument as error:
        return "note", error.message
    confined = reading_confinement()
    words = f"documents are read apart, by {', '.join(confined)}"
    if missing := unreadable_kinds():
        return "note", f"{words}; for {', '.join(missing)}: pip install -e '.[files]'"
    means = {name.partition(" ")[0] for name in confined}
    if not {"bubblewrap", "Landlock"} & means:
        return "note", f"{words}: what reads them can open files of the server; bubblewrap would prevent that"
    if "seccomp" not in means and sys.platform == "linux":
        return "note", f"{words}: the system calls of this machine are not known, so all of them can be made"
    return "ok", words


async def check_sandbox(config: Config) -> Finding:
    from server.process import look_for_sandbox

    found = await look_for_sandbox(config)
    if found.sandbox is None:
        if config.sandbox == "auto":
            return "note", f"no code is run, because no sandbox works here: {found.told}"
        return ("ok" if config.sandbox == "off" else "FAIL"), found.told
    return ("note" if found.passed_over else "ok"), "; ".join(
        [f"code runs by {found.for_operators}", *found.passed_over]
    )
