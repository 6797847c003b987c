"""Items as clients send them, by their types: a sample or more of every type that there is."""

from __future__ import annotations

from tests.support.wire import Json

CALLER = {"caller": {"type": "direct"}}
SAMPLES: dict[str, list[Json]] = {
    "function_call": [
        {"call_id": "c", "name": "f", "arguments": "{}"},
        {"call_id": "c", "name": "f", "arguments": "", "status": "incomplete", "namespace": "n", **CALLER},
    ],
    "function_call_output": [
        {"call_id": "c", "output": "sunny"},
        {
            "call_id": "c",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_image", "file_id": "f"}],
        },
    ],
    "custom_tool_call": [{"call_id": "c", "name": "f", "input": "free"}],
    "custom_tool_call_output": [{"call_id": "c", "output": "x"}],
    "reasoning": [
        {"summary": []},
        {
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
            "encrypted_content": None,
        },
    ],
    "web_search_call": [
        {
            "action": {
                "type": "search",
                "query": "q",
                "queries": ["q"],
                "sources": [{"type": "url", "url": "u"}],
            }
        },
        {"action": {"type": "open_page", "url": "u"}, "status": "searching"},
        {"action": {"type": "find_in_page", "url": "u", "pattern": "p"}},
        {},
    ],
    "file_search_call": [{"queries": ["q"]}, {"queries": [], "results": [{"file_id": "f", "score": 0.5}]}],
    "code_interpreter_call": [
        {"container_id": "c", "code": "1", "outputs": [{"type": "logs", "logs": "l"}]},
        {"container_id": "c", "code": None, "outputs": None},
    ],
    "image_generation_call": [{"result": "aGk="}, {"result": None, "status": "generating"}],
    "computer_call": [
        {"call_id": "c", "action": {"type": "click", "button": "left", "x": 1, "y": 2}},
        {
            "call_id": "c",
            "actions": [
                {"type": "double_click", "x": 1, "y": 2, "keys": None},
                {"type": "drag", "path": [{"x": 1, "y": 2}]},
                {"type": "keypress", "keys": ["a"]},
                {"type": "move", "x": 1, "y": 2},
                {"type": "screenshot"},
                {"type": "scroll", "x": 1, "y": 2, "scroll_x": 0, "scroll_y": 3},
                {"type": "type", "text": "t"},
                {"type": "wait"},
            ],
            "pending_safety_checks": [{"id": "s", "code": "c", "message": "m"}],
        },
    ],
    "computer_call_output": [{"call_id": "c", "output": {"type": "computer_screenshot", "image_url": "u"}}],
    "local_shell_call": [{"call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}}],
    "local_shell_call_output": [{"id": "lsho_1", "output": "o"}],
    "shell_call": [
        {"call_id": "c", "action": {"commands": ["ls"]}},
        {
            "call_id": "c",
            "action": {"commands": [], "timeout_ms": 5},
            "environment": {"type": "local"},
            **CALLER,
        },
    ],
    "shell_call_output": [
        {
            "call_id": "c",
            "output": [
                {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        }
    ],
    "apply_patch_call": [
        {"call_id": "c", "operation": {"type": "create_file", "path": "p", "diff": "d"}},
        {"call_id": "c", "operation": {"type": "delete_file", "path": "p"}, "status": "in_progress"},
        {"call_id": "c", "operation": {"type": "update_file", "path": "p", "diff": "d"}},
    ],
    "apply_patch_call_output": [{"call_id": "c", "status": "failed", "output": "o"}],
    "mcp_list_tools": [{"server_label": "s", "tools": [{"name": "t", "input_schema": {}}]}],
    "mcp_call": [
        {"server_label": "s", "name": "t", "arguments": "{}", "output": "o"},
        {
            "server_label": "s",
            "name": "t",
            "arguments": "{}",
            "error": {"type": "http_error", "code": 500, "message": "m"},
            "status": "failed",
        },
    ],
    "mcp_approval_request": [{"server_label": "s", "name": "t", "arguments": "{}"}],
    "mcp_approval_response": [{"approval_request_id": "mcpr_1", "approve": True, "reason": None}],
    "compaction": [{"encrypted_content": "e"}],
    "tool_search_call": [{"arguments": {}}, {"call_id": "c", "execution": "client", "arguments": {"a": 1}}],
    "tool_search_output": [
        {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}]},
        {
            "call_id": "c",
            "tools": [
                {"type": "custom", "name": "f"},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
                {
                    "type": "mcp",
                    "server_label": "s",
                    "server_url": "https://a.example",
                    "allowed_tools": ["t"],
                },
            ],
        },
    ],
    "additional_tools": [{"role": "developer", "tools": [{"type": "web_search"}]}],
    "program": [{"id": "prog_1", "call_id": "c", "code": "x", "fingerprint": "f"}],
    "program_output": [{"id": "po_1", "call_id": "c", "result": "r", "status": "completed"}],
    "compaction_trigger": [{}],
    "configuration_update": [{"reasoning": {"effort": "low"}}],
}
