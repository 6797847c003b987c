"""A stream that survives a cut connection: `python examples/stream_and_resume.py`.

It needs the OpenAI SDK (`pip install openai`), and a server (`make serve`). The first connection is
dropped after a few events; a second one goes on at the very next event.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8000").removesuffix("/v1") + "/v1",
    api_key="unused",
)
MODEL = "antiphon-tiny"


def main() -> None:
    """Read a few events, drop the connection, resume after the last one seen."""
    response_id, last = "", -1
    text = ""
    with client.responses.create(model=MODEL, input="Count from 1 to 20.", stream=True) as stream:
        for event in stream:
            last = event.sequence_number
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                text += event.delta
            if last == 8:
                break  # leaving the `with` block closes the connection
    print(f"cut after event {last}: {text!r}")

    for event in client.responses.retrieve(response_id, stream=True, starting_after=last):
        if event.type == "response.output_text.delta":
            text += event.delta
    print(f"resumed: {text!r}")
    assert text == client.responses.retrieve(response_id).output_text


if __name__ == "__main__":
    main()
