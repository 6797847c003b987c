"""The formats of tool calls that several rows of the table of dialects share, or that are long."""

from __future__ import annotations

from dataclasses import replace

from engine.dialects.spec import CallMarks, ParameterMarks

# A function's name as models write it without quotes. Repetitions in these regexes are possessive: whatever a
# model writes, no match goes back and tries again.
NAME = r"""([^\s<>{}()\[\]"'`|｜:,=]++)"""

HERMES = CallMarks(open="<tool_call>", close="</tool_call>", before_name='\n{"name": ', end="}\n")
LLAMA_JSON = CallMarks(
    open="<|python_tag|>",
    bare=True,
    lead="",
    separator="; ",
    strip=";, \n",
    slack="",
    before_arguments=', "parameters": ',
)
MISTRAL_LIST = CallMarks(
    open="[TOOL_CALLS]",
    front=" [",
    back="]",
    many=True,
    lead="",
    separator=", ",
    strip="",
    before_name='{"name": ',
)
MISTRAL_NAMED = CallMarks(
    open="[TOOL_CALLS]",
    kind="named",
    lead="",
    separator="",
    strip="",
    slack="",
    before_name="",
    before_arguments="[ARGS]",
    end="",
    quoted=False,
    header=rf"\s*+{NAME}\s*+(?:\[CALL_ID\][^\[{{]*+)?(?:\[ARGS\])?\s*+",
    inner=("[CALL_ID]", "[ARGS]"),
)
PYTHONIC = CallMarks(
    kind="python",
    bare=True,
    many=True,
    lead="",
    front="[",
    back="]",
    separator=", ",
    strip="",
    slack=")",
    before_name="",
    before_arguments="(",
    end=")",
    quoted=False,
)
FUNCTION_TAGS = CallMarks(
    open="<tool_call>",
    close="</tool_call>",
    kind="tags",
    each_open="<function=",
    each_close="</function>",
    lead="\n\n",
    before_name="\n<function=",
    before_arguments=">\n",
    end="</function>\n",
    quoted=False,
    parameters=ParameterMarks("<parameter=", ">", "", "</parameter>", strip=True, pad="\n"),
)
DEEPSEEK = CallMarks(
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    kind="named",
    many=True,
    each_open="<｜tool▁call▁begin｜>",
    each_close="<｜tool▁call▁end｜>",
    lead="",
    slack="}`",
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    quoted=False,
    header=rf"\s*+(?:function\s*+<｜tool▁sep｜>)?\s*+{NAME}\s*+(?:<｜tool▁sep｜>)?"
    r"\s*+(?:(?:```)?json|```)?\s*+(?:```\s*+)?",
    inner=("<｜tool▁sep｜>",),
)
DEEPSEEK_BARE = replace(
    DEEPSEEK,
    separator="",
    before_name="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
DSML = CallMarks(
    open="<｜DSML｜function_calls>",
    close="</｜DSML｜function_calls>",
    kind="tags",
    many=True,
    each_open="<｜DSML｜invoke name=",
    each_close="</｜DSML｜invoke>",
    lead="\n\n",
    front="\n",
    back="\n",
    before_name='<｜DSML｜invoke name="',
    before_arguments='">\n',
    end="</｜DSML｜invoke>",
    quoted=False,
    inner=("｜DSML｜",),
    parameters=ParameterMarks(
        "<｜DSML｜parameter name=",
        ">",
        "",
        "</｜DSML｜parameter>",
        strip=False,
        quoted=True,
        kinds=(' string="true"', ' string="false"'),
    ),
)
DSML_V4 = replace(DSML, open="<｜DSML｜tool_calls>", close="</｜DSML｜tool_calls>")
GEMMA = CallMarks(
    open="<|tool_call>",
    close="<tool_call|>",
    kind="keyed",
    each_open="call:",
    lead="",
    separator="",
    before_name="call:",
    before_arguments="{",
    quoted=False,
    quote='<|"|>',
)
GLM = CallMarks(
    open="<tool_call>",
    close="</tool_call>",
    kind="tags",
    before_name="",
    before_arguments="\n",
    end="",
    quoted=False,
    parameters=ParameterMarks(
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", strip=False, gap="\n"
    ),
)
GRANITE = CallMarks(open="<|tool_call|>", front="[", back="]", many=True, lead="", separator=", ")
PHI = replace(GRANITE, close="<|/tool_call|>")
LFM2 = replace(PYTHONIC, open="<|tool_call_start|>", close="<|tool_call_end|>", bare=False, strip="\n")
KIMI = CallMarks(
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    kind="named",
    many=True,
    each_open="<|tool_call_begin|>",
    each_close="<|tool_call_end|>",
    lead="",
    separator="",
    before_name="<|tool_call_begin|>functions.",
    before_arguments=":0<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    quoted=False,
    header=rf"\s*+(?:functions\.)?{NAME}(?::\d++)?\s*+<\|tool_call_argument_begin\|>\s*+",
    alias=r"(?:functions[._]?)?(.+?)[:_]?\d++",
    inner=("<|tool_call_argument_begin|>",),
)
