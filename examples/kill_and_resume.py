"""A stream that survives `kill -9` of its server: `python examples/kill_and_resume.py`.

It needs the OpenAI SDK (`pip install openai`). The program starts a server of its own on a free port,
kills it in the middle of an answer, starts it again, and reads the stream on from the next event. It then
compares the text with that of the same request to which nothing happened.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from openai import OpenAI

ANTIPHON = str(Path(sys.executable).with_name("antiphon"))
REQUEST = {
    "model": "antiphon-tiny",
    "input": "Count from 1 to 100.",
    "temperature": 1,
    "extra_body": {"seed": 7},
}


def start(data: str) -> tuple[subprocess.Popen[str], OpenAI]:
    """A server on a free port, and a client of it once it takes requests."""
    server = subprocess.Popen(
        [ANTIPHON, "serve", "--port", "0", "--data", data],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
    return server, OpenAI(base_url=f"{url}/v1", api_key="unused")


def main() -> None:
    """Kill, restart, resume, compare."""
    with tempfile.TemporaryDirectory() as data:
        server, client = start(data)
        try:
            text, response_id, last = "", "", -1
            for event in client.responses.create(**REQUEST, stream=True):
                last = event.sequence_number
                if event.type == "response.created":
                    response_id = event.response.id
                if event.type == "response.output_text.delta":
                    text += event.delta
                if last == 20:
                    break
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            print(f"killed the server after event {last}: {text!r}")

            began = time.monotonic()
            server, client = start(data)
            print(f"the server is back after {time.monotonic() - began:.1f} s")
            for event in client.responses.retrieve(response_id, stream=True, starting_after=last):
                assert event.sequence_number == last + 1
                last = event.sequence_number
                if event.type == "response.output_text.delta":
                    text += event.delta
            print(f"the stream went on to event {last}: {text[:20]!r} ... {text[-16:]!r}")

            undisturbed = client.responses.create(**REQUEST)
            print("same text as without the kill:", text == undisturbed.output_text)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
