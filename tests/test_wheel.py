"""The wheel, installed where nothing of the checkout is, serves and answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import venv
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]


def installed(folder: Path) -> Path:
    """An environment with the wheel; what the wheel needs it takes from the one that runs the tests."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)],
        check=True,
        cwd=ROOT,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = folder.glob("antiphon-*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return folder / "venv" / "bin"


async def test_an_installed_wheel_serves_and_answers(tmp_path: Path) -> None:
    programs = await asyncio.to_thread(installed, tmp_path)
    where = subprocess.run(
        [programs / "python", "-c", "import server, storage; print(server.__file__, storage.__file__)"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert all(place.startswith(str(tmp_path)) for place in where.stdout.split())
    process = await asyncio.create_subprocess_exec(
        *(str(programs / "antiphon"), "serve", "--engine", "scripted", "--port", "0", "--data", "data"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        banner = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        url = banner.split("listens on ")[1].split()[0]
        async with httpx.AsyncClient(base_url=url) as client:
            reply = await client.post("/v1/responses", json={"input": "say hello"})
        assert reply.json()["output"][0]["content"][0]["text"] == "hello"
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
