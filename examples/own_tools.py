"""Tools that the server runs itself: `python examples/own_tools.py`.

It needs the OpenAI SDK (`pip install openai`). The program writes a file of tools, a program and what it
is told to be, starts a server of its own with it, and asks something that the model needs the tool for.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from openai import OpenAI

ANTIPHON = str(Path(sys.executable).with_name("antiphon"))
TOOLS = """
[tools.get_weather]
description = "Get the weather of a city."
command = ["python3", "weather.py"]
idempotent = true

[tools.get_weather.parameters]
type = "object"
required = ["city"]
properties.city = {type = "string"}
"""
PROGRAM = """
import json, sys

city = json.load(sys.stdin)["city"]
print("sunny" if city == "Paris" else "rain")
"""


def main() -> None:
    """Write the tools, start a server with them, ask."""
    with tempfile.TemporaryDirectory() as data:
        Path(data, "tools.toml").write_text(TOOLS)
        Path(data, "weather.py").write_text(PROGRAM)
        server = subprocess.Popen(
            [ANTIPHON, "serve", "--port", "0", "--data", data],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            response = OpenAI(base_url=f"{url}/v1", api_key="unused").responses.create(
                model="antiphon-tiny",
                input="What is the weather in Paris?",
                tools=[
                    {
                        "type": "mcp",
                        "server_label": "own",
                        "server_url": "builtin:",
                        "allowed_tools": ["get_weather"],
                    }
                ],
            )
            for item in response.output:
                if item.type == "mcp_call":
                    print(item.name, item.arguments, "->", item.output)
            print(response.output_text)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
