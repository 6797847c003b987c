"""The table of dialects: how each model family marks its reasoning and its tool calls.

A row is chosen by a checkpoint's chat template. No other module knows a tag: the parser, the grammars and the
renderer are driven by the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.dialects.call_formats import (
    DEEPSEEK,
    DEEPSEEK_BARE,
    DSML,
    DSML_V4,
    FUNCTION_TAGS,
    GEMMA,
    GLM,
    GRANITE,
    HERMES,
    KIMI,
    LFM2,
    LLAMA_JSON,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    NAME,
    PHI,
    PYTHONIC,
)
from engine.dialects.spec import CallMarks, ChannelMarks, Dialect, History, ParameterMarks, ReasoningMarks

__all__ = [
    "DIALECTS",
    "CallMarks",
    "Dialect",
    "ReasoningMarks",
    "choose_dialect",
    "detect_dialect",
    "dialect_named",
]

THINK = ReasoningMarks(open="<think>", close="</think>")
TIGHT = ReasoningMarks(open="<think>", close="</think>", head="", tail="", after="")

DIALECTS: tuple[Dialect, ...] = (
    # Qwen2.5, Qwen3, Hermes 2/3, Granite 4 and the shipped model. The reasoning tags are harmless where a
    # model has none.
    Dialect(
        name="hermes",
        reasoning=THINK,
        calls=HERMES,
        detect=(("<tool_call>", '"arguments"'), ("<tool_call>", "arguments | tojson")),
        turn="<|im_start|>",
    ),
    # Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step 3.5.
    Dialect(
        name="qwen3-coder",
        reasoning=THINK,
        calls=FUNCTION_TAGS,
        also=(HERMES,),
        interrupts=tuple(f"<tool_call>{space}<function=" for space in ("", "\n", "\n\n")),
        detect=(("<function=", "<parameter=", "</parameter>", "</function>"),),
        turn="<|im_start|>",
    ),
    # Llama 3.1 to 3.3: the whole turn is one JSON object, sometimes after <|python_tag|>; built-in tools
    # are called as Python, and tools described in the prompt's own words as <function=NAME>{...}</function>
    # or, by the small models, as a list in Python.
    Dialect(
        name="llama3-json",
        calls=LLAMA_JSON,
        also=(
            CallMarks(open="<|python_tag|>", kind="python", strip="; \n", slack="", quoted=False),
            PYTHONIC,
            CallMarks(
                close="</function>",
                kind="named",
                each_open="<function=",
                header=rf'\s*+"?{NAME}"?\s*+>\s*+',
                quoted=False,
            ),
        ),
        detect=(("<|start_header_id|>", '"parameters": '),),
        turn="<|start_header_id|>",
        history=History(single=True),
    ),
    Dialect(
        name="llama4-pythonic",
        calls=replace(PYTHONIC, open="<|python_start|>", close="<|python_end|>"),
        also=(
            CallMarks(
                open="<|python_start|>",
                close="<|python_end|>",
                bare=True,
                lead="",
                separator="; ",
                strip="; \n",
                before_arguments=', "parameters": ',
            ),
        ),
        detect=(("<|header_start|>", "<|header_end|>"),),
        turn="<|header_start|>",
    ),
    # Mistral 7B v0.3 to Small 3 (tokenizers v3 and v7): a list after one tag.
    Dialect(
        name="mistral-list",
        reasoning=ReasoningMarks(open="[THINK]", close="[/THINK]", head="", tail="", after=""),
        calls=MISTRAL_LIST,
        also=(MISTRAL_NAMED,),
        detect=(("[TOOL_CALLS]",),),
        turn="[/INST]",
        history=History(call_ids="{digest}"),
    ),
    # Mistral Small 3.1 and later, Magistral, Devstral (tokenizers v11 and v13): a tag for each call.
    Dialect(
        name="mistral",
        reasoning=ReasoningMarks(open="[THINK]", close="[/THINK]", head="", tail="", after=""),
        calls=MISTRAL_NAMED,
        also=(MISTRAL_LIST,),
        detect=(("[TOOL_CALLS]", "[ARGS]"),),
        turn="[/INST]",
        history=History(call_ids="{digest}"),
    ),
    # DeepSeek V3 and R1.
    Dialect(
        name="deepseek",
        reasoning=THINK,
        calls=DEEPSEEK,
        interrupts=(DEEPSEEK.open,),
        detect=(("<｜tool▁calls▁begin｜>", "```json"),),
        turn="<｜Assistant｜>",
        history=History(arguments="string", null_text=True),
    ),
    Dialect(
        name="deepseek-v3.1",
        reasoning=TIGHT,
        calls=DEEPSEEK_BARE,
        interrupts=(DEEPSEEK.open,),
        detect=(("<｜tool▁calls▁begin｜>",),),
        turn="<｜Assistant｜>",
        history=History(arguments="string"),
    ),
    # DeepSeek V3.2, and V4, whose outer tags have another name.
    Dialect(
        name="deepseek-v3.2",
        reasoning=TIGHT,
        calls=DSML,
        also=(DSML_V4,),
        interrupts=(DSML.open, DSML_V4.open),
        detect=(("｜DSML｜", "function_calls>"),),
        turn="<｜Assistant｜>",
    ),
    Dialect(
        name="deepseek-v4",
        reasoning=TIGHT,
        calls=DSML_V4,
        also=(DSML,),
        interrupts=(DSML.open, DSML_V4.open),
        detect=(("｜DSML｜", "tool_calls>"),),
        turn="<｜Assistant｜>",
    ),
    # gpt-oss. The messages of one turn are read here, token by token as they come, and not by the package
    # openai-harmony: that wants its own encoding from the network, reads tokens of no other tokenizer, and
    # raises on what a model garbles.
    Dialect(
        name="harmony",
        reasoning=ReasoningMarks(
            open="<|channel|>analysis<|message|>",
            close="<|end|>",
            head="",
            tail="",
            after="<|start|>assistant",
            strip="",
            ends=("<|start|>", "<|channel|>", "<|return|>", "<|call|>"),
        ),
        calls=CallMarks(
            kind="named",
            each_close="<|call|>",  # the end of the turn, too, so it is not written
            lead="",
            separator="<|call|><|start|>assistant",
            strip="",
            before_name="<|channel|>commentary to=functions.",
            before_arguments=" <|constrain|>json<|message|>",
            end="",
            quoted=False,
        ),
        channels=ChannelMarks(
            start="<|start|>",
            channel="<|channel|>",
            message="<|message|>",
            ends=("<|end|>", "<|call|>", "<|return|>"),
            thoughts=("analysis",),
            preambles=("commentary",),
            prefix="functions.",
            people=("user", "assistant"),
            inner=("<|constrain|>",),
        ),
        detect=(("<|start|>", "<|channel|>", "<|message|>"),),
        turn="<|start|>assistant",
        history=History(single=True),
    ),
    # Gemma 3 was taught no layout of its own: prompts ask for Python, as a list or in a block of code, or for
    # a JSON object.
    Dialect(
        name="gemma3",
        calls=replace(PYTHONIC, strip="\n"),
        also=(
            CallMarks(open="```tool_code", close="```", kind="python", slack=")", quoted=False),
            CallMarks(open="```tool_code", close="```", before_arguments=', "parameters": '),
            CallMarks(open="```tool_call", close="```", before_arguments=', "parameters": '),
            CallMarks(
                bare=True, close="```", lead="```json\n", slack="", before_arguments=', "parameters": '
            ),
        ),
        detect=(("<start_of_turn>",),),
        turn="<start_of_turn>",
        history=History(told=PYTHONIC),
    ),
    # Gemma 4. A thought that nobody asked for is empty.
    Dialect(
        name="gemma4",
        reasoning=ReasoningMarks(
            open="<|channel>thought", close="<channel|>", after="", inner=("<|channel>",)
        ),
        calls=GEMMA,
        interrupts=(GEMMA.open,),
        detect=(("<|tool_call>", "<tool_call|>"),),
        turn="<|turn>model",
    ),
    Dialect(
        name="granite",
        reasoning=ReasoningMarks(
            open="<think>",
            close="</think>",
            head="",
            tail="",
            after="",
            strip=" \n",
            answers=(("<response>", "</response>"),),
            also=(
                ("Here is my thought process:", "Here is my response:"),
                ("Here's my thought process:", "Here's my response:"),
            ),
        ),
        calls=GRANITE,
        also=(replace(HERMES, many=True), CallMarks(open="<function_call>")),
        detect=(("<|tool_call|>", "<|start_of_role|>"),),
        turn="<|start_of_role|>",
        history=History(told=GRANITE),
    ),
    Dialect(
        name="phi4",
        reasoning=THINK,
        calls=PHI,
        also=(CallMarks(open="functools", many=True, lead="", separator=", "),),
        detect=(("<|tool|>", "<|/tool|>"), ("functools[",), ("<|tool_call|>", "<|/tool_call|>")),
        turn="<|assistant|>",
        history=History(arguments="string", told=PHI),
    ),
    # GLM-4.5 and 4.6.
    Dialect(
        name="glm",
        reasoning=replace(TIGHT, after="\n"),
        calls=GLM,
        also=(HERMES,),
        interrupts=(GLM.open,),
        detect=(("<tool_call>", "<arg_key>", "<arg_value>"),),
        turn="<|assistant|>",
    ),
    # GLM-4.7 and 5 write the same without line breaks.
    Dialect(
        name="glm-4.7",
        reasoning=TIGHT,
        calls=replace(
            GLM,
            lead="",
            separator="",
            before_arguments="",
            parameters=ParameterMarks(
                "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", strip=False, after=""
            ),
        ),
        also=(HERMES,),
        interrupts=(GLM.open,),
        detect=(("<tool_call>", "<arg_key>", "</arg_key><arg_value>", "</arg_value>"),),
        turn="<|assistant|>",
    ),
    Dialect(
        name="kimi-k2",
        reasoning=TIGHT,
        calls=KIMI,
        also=(replace(KIMI, open="<|tool_call_section_begin|>", close="<|tool_call_section_end|>"),),
        interrupts=(KIMI.open, KIMI.each_open),
        detect=(("<|im_middle|>", "<|im_assistant|>"), ("<|tool_calls_section_begin|>",)),
        turn="<|im_assistant|>",
        history=History(call_ids="functions.{name}:{index}"),
    ),
    Dialect(
        name="minimax-m1",
        reasoning=THINK,
        calls=CallMarks(
            open="<tool_calls>",
            close="</tool_calls>",
            many=True,
            front="\n",
            separator="",
            end="}\n",
        ),
        detect=(("<tool_calls>", "</tool_calls>"),),
        turn="<beginning_of_sentence>",
    ),
    Dialect(
        name="minimax-m2",
        reasoning=THINK,
        calls=CallMarks(
            open="<minimax:tool_call>",
            close="</minimax:tool_call>",
            kind="tags",
            many=True,
            each_open="<invoke name=",
            each_close="</invoke>",
            front="\n",
            back="\n",
            before_name='<invoke name="',
            before_arguments='">\n',
            end="</invoke>",
            quoted=False,
            parameters=ParameterMarks("<parameter name=", ">", "", "</parameter>", strip=True, quoted=True),
        ),
        interrupts=('<minimax:tool_call>\n<invoke name="',),
        detect=(("<minimax:tool_call>", "<invoke name="),),
        turn="]~b]",
    ),
    # Seed-OSS.
    Dialect(
        name="seed-oss",
        reasoning=ReasoningMarks(open="<seed:think>", close="</seed:think>", head="", tail="", after="\n"),
        calls=replace(
            FUNCTION_TAGS,
            open="<seed:tool_call>",
            close="</seed:tool_call>",
            lead="\n",
            parameters=ParameterMarks("<parameter=", ">", "", "</parameter>", strip=False),
        ),
        detect=(("<seed:tool_call>", "</seed:tool_call>", "<function=", "<parameter="),),
        turn="<seed:bos>assistant",
    ),
    # Nemotron Nano 2 and Llama Nemotron.
    Dialect(
        name="nemotron",
        reasoning=THINK,
        calls=CallMarks(
            open="<TOOLCALL>", close="</TOOLCALL>", front="[", back="]", many=True, separator=", "
        ),
        detect=(("<TOOLCALL>", "</TOOLCALL>"),),
        turn="<SPECIAL_11>Assistant",
    ),
    # Command R7B and Command A.
    Dialect(
        name="command-r",
        reasoning=ReasoningMarks(
            open="<|START_THINKING|>",
            close="<|END_THINKING|>",
            head="",
            tail="",
            after="",
            answers=(
                ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
                ("<|START_TEXT|>", "<|END_TEXT|>"),
            ),
        ),
        calls=CallMarks(
            open="<|START_ACTION|>",
            close="<|END_ACTION|>",
            many=True,
            lead="",
            front="[\n    ",
            back="\n]",
            separator=",\n    ",
            before_name='{"tool_call_id": "0", "tool_name": ',
            before_arguments=', "parameters": ',
            name_key="tool_name",
        ),
        detect=(("<|START_ACTION|>", "<|END_ACTION|>"),),
        turn="<|CHATBOT_TOKEN|>",
    ),
    # LFM2.
    Dialect(
        name="lfm2",
        reasoning=TIGHT,
        calls=LFM2,
        detect=(("<|tool_list_start|>",), ("<|tool_call_start|>",)),
        turn="<|im_start|>",
        history=History(told=LFM2),
    ),
    # Olmo 3.
    Dialect(
        name="olmo3",
        reasoning=THINK,
        calls=replace(
            PYTHONIC,
            open="<function_calls>",
            close="</function_calls>",
            bare=False,
            front="",
            back="",
            separator="\n",
            strip="\n",
        ),
        detect=(("<function_calls>", "</function_calls>"),),
        turn="<|im_start|>",
    ),
    # Hunyuan A13B.
    Dialect(
        name="hunyuan",
        reasoning=replace(THINK, answers=(("<answer>", "</answer>"),), after="\n"),
        calls=CallMarks(
            open="<tool_calls>", close="</tool_calls>", front="[", back="]", many=True, separator=", "
        ),
        detect=(("<tool_calls>", "</tool_calls>", "<answer>"),),
    ),
    # InternLM 2.5 and 3.
    Dialect(
        name="internlm",
        reasoning=THINK,
        calls=CallMarks(
            open="<|action_start|><|plugin|>",
            close="<|action_end|>",
            before_name='\n{"name": ',
            before_arguments=', "parameters": ',
        ),
        detect=(("<|action_start|>", "<|plugin|>"),),
        turn="<|im_start|>",
    ),
    # Text only. A chat model whose template knows <think> and no calls gets its reasoning read all the same.
    Dialect(name="think", reasoning=THINK, detect=(("</think>",),), turn="<|im_start|>"),
    Dialect(name="plain"),
)


def dialect_named(name: str) -> Dialect:
    """The row of that name, `none` being `plain`; KeyError with the known names."""
    for row in DIALECTS:
        if row.name == ("plain" if name == "none" else name):
            return row
    raise KeyError(f"no dialect {name!r}; known: none, {', '.join(row.name for row in DIALECTS)}")


def detect_dialect(chat_template: str | None) -> Dialect:
    """The row that a chat template asks for; `plain` where none does (or there is no template).

    It is the one of which most stands in the template, whatever its place in the table. Where the template
    does not know its reasoning tags, but <think>, those are taken.
    """
    template = chat_template or ""
    row = _most(DIALECTS, template)
    known = row.reasoning is not None and row.reasoning.close in template
    return row.thinking_as(dialect_named("think")) if THINK.close in template and not known else row


def choose_dialect(
    chat_template: str | None, *, tools: str | None = None, reasoning: str | None = None
) -> Dialect:
    """The row that a chat template asks for, but for the halves that are named (`none`: no such marks).

    Raises KeyError for an unknown name.
    """
    found = detect_dialect(chat_template)
    if tools is not None:
        row = dialect_named(tools)
        found = row if row.channels is not None or _alike(row, found) else row.thinking_as(found)
    return found if reasoning is None else found.thinking_as(dialect_named(reasoning))


def _alike(row: Dialect, found: Dialect) -> bool:
    """Whether the reasoning marks of a row say all that was found."""
    mine, theirs = row.reasoning, found.reasoning
    return theirs is None or (mine is not None and (mine.open, mine.close) == (theirs.open, theirs.close))


def _most(rows: Iterable[Dialect], template: str) -> Dialect:
    """The row with the most characters of marks in a template."""

    def weight(row: Dialect) -> int:
        found = (sum(map(len, marks)) for marks in row.detect if all(mark in template for mark in marks))
        return max(found, default=0)

    best = max(rows, key=weight)
    return best if weight(best) else dialect_named("plain")
