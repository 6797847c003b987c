"""LangChain on this server, which keeps the conversation: `python examples/langchain_chat.py`.

It needs `pip install langchain-openai`, and a server (`make serve`).
"""

import os

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

URL = os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8000").removesuffix("/v1") + "/v1"


def main() -> str:
    """Two turns; the server keeps the first, so only its id is sent with the second."""
    model = ChatOpenAI(
        model="antiphon-tiny",
        base_url=URL,
        api_key=SecretStr("unused"),
        use_responses_api=True,
        use_previous_response_id=True,
    )
    first = model.invoke("My name is Mark.")
    answer = model.invoke([("user", "My name is Mark."), first, ("user", "What is my name?")])
    print(answer.text)
    return str(answer.text)


if __name__ == "__main__":
    main()
