"""A conversation that the server remembers: `python examples/quickstart.py`.

It needs a server (`make serve`) and the OpenAI SDK (`pip install openai`). The environment variable
ANTIPHON_URL names another server than http://127.0.0.1:8000.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8000").removesuffix("/v1") + "/v1",
    api_key="unused",
)
MODEL = "antiphon-tiny"


def main() -> None:
    """Say a name, then ask for it by `previous_response_id`: only the new words travel."""
    first = client.responses.create(model=MODEL, input="My name is Mark.")
    print(first.output_text)
    second = client.responses.create(model=MODEL, input="What is my name?", previous_response_id=first.id)
    print(second.output_text)

    conversation = client.conversations.create()
    client.responses.create(model=MODEL, input="My name is Anna.", conversation=conversation.id)
    third = client.responses.create(model=MODEL, input="What is my name?", conversation=conversation.id)
    print(third.output_text)
    print(len(client.conversations.items.list(conversation.id).data), "items in the conversation")


if __name__ == "__main__":
    main()
