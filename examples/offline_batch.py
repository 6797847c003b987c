"""Many prompts at once without a server: `python examples/offline_batch.py`.

`LLM` loads a model into this process and returns results in the order of the prompts. A folder or a Hugging
Face id in place of `LLM()` names another model.
"""

from engine import LLM, Options

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def user(text: str) -> list[dict[str, str]]:
    """A conversation that begins."""
    return [{"role": "user", "content": text}]


def main() -> None:
    """Answers, a choice that the decoder enforces, a call of a tool, and a prompt that fails by itself."""
    greedy = Options(temperature=0, max_tokens=40)
    with LLM(max_model_len=1024) as llm:
        for result in llm.chat(
            [user(f"My name is {name}. What is my name?") for name in ("Mark", "Anna")], greedy
        ):
            print(result.text, len(result.token_ids), "tokens", result.finish)

        (chosen,) = llm.chat(user("Is the sky green?"), Options(choice=["yes", "no"], seed=1))
        print("chosen:", chosen.text)

        (called,) = llm.chat(user("What is the weather in Paris?"), greedy, tools=[WEATHER])
        print(called.calls[0].name, called.calls[0].arguments)

        fine, long = llm.generate(["Once upon a time", "word " * 5000], greedy)
        print("fine:", fine.error, "- too long:", long.error)


if __name__ == "__main__":
    main()
