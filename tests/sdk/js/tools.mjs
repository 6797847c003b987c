// The official tools of Vercel's AI SDK, unmodified, against this server: those that the server carries out
// (web_search, mcp with its approvals), and those that the client does. The SDK checks every item and every event
// against schemas of its own, so a field of another shape fails here.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText } from "ai";

import { against, all, MODEL } from "./serving.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

const SEARCH = 'call web_search {"queries": ["spring tide"]}';
const SUM = 'call calculator {"expression": "6 * 7"}';

/** An answer of the SDK, whole or streamed: its text, its content, its sources and the messages to go on with. */
async function answer(settings, streamed) {
  const options = { stopWhen: stepCountIs(4), maxRetries: 0, ...settings };
  if (!streamed) {
    const { text, content, sources, response } = await generateText(options);
    return { text, content, sources, messages: response.messages };
  }
  const stream = streamText({ ...options, onError() {} });
  for (const part of await all(stream.fullStream)) if (part.type === "error") throw part.error;
  const { messages } = await stream.response;
  return { text: await stream.text, content: await stream.content, sources: await stream.sources, messages };
}

/** Runs a check with answers that are whole and streamed, of responses that are stored and not. */
const inEachWay = (check) => async ({ baseURL }) => {
  const openai = createOpenAI({ baseURL, apiKey: "unused" });
  for (const streamed of [false, true]) {
    for (const store of [true, false]) {
      const fixed = { model: openai.responses(MODEL), providerOptions: { openai: { store } } };
      await check({ ask: (settings) => answer({ ...fixed, ...settings }, streamed), official: openai.tools, store });
    }
  }
};

const checks = {
  "a search, its sources, and the turn after it": inEachWay(async ({ ask, official }) => {
    const tools = { web_search: official.webSearch({ searchContextSize: "low" }) };
    const asked = [{ role: "user", content: SEARCH }];
    const found = await ask({ tools, messages: asked });
    assert.deepEqual(found.sources.map(({ url }) => url), ["https://demo.test/tides.md"]);
    const result = found.content.find(({ type }) => type === "tool-result");
    assert.equal(result.output.action.query, "spring tide");
    const next = await ask({ tools, messages: [...asked, ...found.messages, { role: "user", content: "say on" }] });
    assert.equal(next.text, "on");
  }),

  "a page that is opened, one that is searched, and one that does not exist": inEachWay(async ({ ask, official }) => {
    const tools = { web_search: official.webSearch({ filters: { allowedDomains: ["demo.test"] } }) };
    const url = "https://demo.test/tides.md";
    const directives = [
      `call open_page {"url": "${url}"}`,
      `call find_in_page {"url": "${url}", "pattern": "moon"}`,
      'call open_page {"url": "https://demo.test/none.md"}',
    ];
    const { text, content } = await ask({ tools, prompt: directives.join("\n") });
    assert.match(text, /There is no such page/);
    const actions = content.filter(({ type }) => type === "tool-result").map(({ output }) => output.action.type);
    assert.deepEqual(actions.slice(0, 2), ["openPage", "findInPage"]);
  }),

  "calls of an MCP server's tools, and one that fails": inEachWay(async ({ ask, official }) => {
    const tools = { mcp: official.mcp({ serverLabel: "here", serverUrl: "builtin:", requireApproval: "never" }) };
    const asked = [{ role: "user", content: `${SUM}\ncall calculator {"expression": "1 / 0"}` }];
    const made = await ask({ tools, messages: asked });
    assert.match(made.text, /division by zero/);
    const results = made.content.filter(({ type }) => type === "tool-result").map(({ output }) => output);
    assert.deepEqual([results.length, results[0].output], [2, "42"]);
    const next = await ask({ tools, messages: [...asked, ...made.messages, { role: "user", content: "say on" }] });
    assert.equal(next.text, "on");
  }),

  "approvals of an MCP server's calls": inEachWay(async ({ ask, official, store }) => {
    if (!store) return; // the SDK sends an answer then, and not what it answers
    const tools = { mcp: official.mcp({ serverLabel: "here", serverUrl: "builtin:", requireApproval: "always" }) };
    for (const approved of [true, false]) {
      const asked = [{ role: "user", content: SUM }];
      const { content, messages } = await ask({ tools, messages: asked });
      const { approvalId } = content.find(({ type }) => type === "tool-approval-request");
      const decision = { type: "tool-approval-response", approvalId, approved, providerExecuted: true };
      const answered = [...asked, ...messages, { role: "tool", content: [decision] }];
      const done = await ask({ tools, messages: answered });
      assert.match(done.text, approved ? /42/ : /the user declined it/);
      const on = { role: "user", content: "say on" };
      assert.equal((await ask({ tools, messages: [...answered, ...done.messages, on] })).text, "on");
    }
  }),

  "shells and patches, which the client carries out": inEachWay(async ({ ask, official }) => {
    const exit = { type: "exit", exitCode: 0 };
    const shell = official.shell({
      execute: async ({ action }) => ({
        output: action.commands.map((command) => ({ stdout: `ran ${command}`, stderr: "", outcome: exit })),
      }),
    });
    assert.match((await ask({ tools: { shell }, prompt: 'call shell {"commands": ["ls"]}' })).text, /ran ls/);
    const local_shell = official.localShell({
      execute: async ({ action }) => ({ output: `ran ${action.command.join(" ")}` }),
    });
    const prompt = 'call local_shell {"command": ["ls", "-l"]}';
    assert.match((await ask({ tools: { local_shell }, prompt })).text, /ran ls -l/);
    const apply_patch = official.applyPatch({
      execute: async ({ operation: { path, diff } }) =>
        path === "a.txt" ? { status: "completed", output: `wrote ${diff}` } : { status: "failed", output: "no file" },
    });
    const patches = [
      'call apply_patch {"type": "create_file", "path": "a.txt", "diff": "+one\\n"}',
      'call apply_patch {"type": "delete_file", "path": "b.txt"}',
    ];
    assert.match((await ask({ tools: { apply_patch }, prompt: patches.join("\n") })).text, /wrote \+one.*no file/s);
  }),

  "a custom tool with a grammar": inEachWay(async ({ ask, official }) => {
    const format = { type: "grammar", syntax: "regex", definition: "#[0-9a-f]{6}" };
    const paint = official.customTool({ name: "paint", format, execute: async (colour) => `painted ${colour}` });
    assert.match((await ask({ tools: { paint }, prompt: 'call paint {"input": "#00ff00"}' })).text, /painted #00ff00/);
  }),
};

const notes = mkdtempSync(join(tmpdir(), "antiphon-notes-"));
try {
  writeFileSync(join(notes, "tides.md"), "# Tides\n\nThe spring tide is highest two days after the full moon.\n");
  await against(["--engine", "scripted", "--demo-web", notes], checks);
} finally {
  rmSync(notes, { recursive: true });
}
