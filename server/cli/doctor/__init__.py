"""`antiphon doctor`: checks whether this machine can serve, and prints a line for each check.

Nothing is made, migrated or repaired: what is missing is told, and the first start of the server makes it.
"""

from __future__ import annotations

import asyncio

from server.cli.doctor.access import check_access
from server.cli.doctor.confinement import check_documents, check_sandbox
from server.cli.doctor.database import check_data, check_database
from server.cli.doctor.findings import Check
from server.cli.doctor.models import check_device, check_model, check_models, check_python, check_texts
from server.cli.doctor.owners import check_limits, check_sealing, check_webhooks
from server.cli.doctor.port import check_port
from server.cli.doctor.reach import check_egress, check_images, check_mcp, check_tools, check_web
from server.cli.doctor.saved_kv import check_kv
from server.config import Config

CHECKS: dict[str, Check] = {
    "python": check_python,
    "torch": check_device,
    "data": check_data,
    "database": check_database,
    "access": check_access,
    "port": check_port,
    "limits": check_limits,
    "sealing": check_sealing,
    "webhooks": check_webhooks,
    "tools": check_tools,
    "egress": check_egress,
    "mcp": check_mcp,
    "web": check_web,
    "documents": check_documents,
    "sandbox": check_sandbox,
    "images": check_images,
    "texts": check_texts,
    "kv": check_kv,
    "models": check_models,
    "model": check_model,
}


def examine(config: Config) -> int:
    """Run every check, print a line each; 1 when one failed: `antiphon serve` would be refused now. That a
    server of this database runs already is no failure."""
    return asyncio.run(_examine(config))


async def _examine(config: Config) -> int:
    failed = False
    for name, check in CHECKS.items():
        verdict, words = await check(config)
        print(f"{verdict:5} {name:9} {words}", flush=True)
        failed = failed or verdict == "FAIL"
    return int(failed)


__all__ = ["CHECKS", "examine"]
