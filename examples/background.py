"""A response that needs no connection: `python examples/background.py`.

It needs the OpenAI SDK (`pip install openai`), and a server (`make serve`). The program starts one in the
background and polls until it has ended, then watches a second one by its events.
"""

import os
import time

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8000").removesuffix("/v1") + "/v1",
    api_key="unused",
)
MODEL = "antiphon-tiny"


def main() -> None:
    """Start in the background, poll until it has ended, then watch a second one by its events."""
    job = client.responses.create(model=MODEL, input="Count from 1 to 20.", background=True)
    print(job.status)
    while job.status in ("queued", "in_progress"):
        time.sleep(0.2)
        job = client.responses.retrieve(job.id)
    print(job.status, job.output_text)

    started = client.responses.create(model=MODEL, input="Say good evening.", background=True)
    for event in client.responses.retrieve(started.id, stream=True):
        print(event.sequence_number, event.type)


if __name__ == "__main__":
    main()
