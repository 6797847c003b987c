// The OpenAI Agents SDK for JavaScript, unmodified: its hosted tools and those that it carries out itself, whole and
// streamed. The items of a run are sent back for another turn.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import * as agents from "@openai/agents";

import { against, MODEL } from "./serving.mjs";

agents.setTracingDisabled(true); // it would go to another server

const SUM = 'call calculator {"expression": "6 * 7"}';

/** Runs a check with runs that are whole and streamed: `run(tool, input)`, or an agent in the place of a tool. */
const inEachWay = (check) => async ({ client }) => {
  const agent = (tool) =>
    new agents.Agent({ name: "A", model: new agents.OpenAIResponsesModel(client, MODEL), tools: [tool] });
  for (const stream of [false, true]) {
    const run = async (tool, input) => {
      const result = await agents.run(tool instanceof agents.Agent ? tool : agent(tool), input, { stream });
      if (stream) {
        for await (const event of result) assert.ok(event.type);
        await result.completed;
      }
      return result;
    };
    const goesOn = async (tool, { history }) => {
      const next = await run(tool, [...history, { role: "user", content: "say on" }]);
      assert.equal(next.finalOutput, "on");
    };
    await check({ agent, run, goesOn });
  }
};

const mcp = (settings) => agents.hostedMcpTool({ serverLabel: "here", serverUrl: "builtin:", ...settings });

const checks = {
  "an agent searches the web": inEachWay(async ({ run, goesOn }) => {
    const found = await run(agents.webSearchTool(), 'call web_search {"queries": ["spring tide"]}');
    assert.ok(found.finalOutput.includes("([demo.test](https://demo.test/tides.md))"));
    await goesOn(agents.webSearchTool(), found);
  }),

  "an agent has an MCP server's tools, and approves their calls": inEachWay(async ({ run, goesOn }) => {
    const onApproval = async () => ({ approve: true });
    for (const tool of [mcp({}), mcp({ requireApproval: "always", onApproval })]) {
      const made = await run(tool, SUM);
      assert.equal(made.finalOutput, "The tool said: 42");
      await goesOn(tool, made);
    }
  }),

  "an agent is interrupted, written down and taken up again": inEachWay(async ({ agent, run, goesOn }) => {
    for (const approved of [true, false]) {
      const asking = agent(mcp({ requireApproval: "always" }));
      const written = (await run(asking, SUM)).state.toString();
      const state = await agents.RunState.fromString(asking, written);
      for (const request of state.getInterruptions()) approved ? state.approve(request) : state.reject(request);
      const done = await run(asking, state);
      assert.match(done.finalOutput, approved ? /42/ : /the user declined it/);
      await goesOn(asking, done);
    }
  }),

  "an agent has a shell, and applies patches": inEachWay(async ({ run, goesOn }) => {
    const outcome = { type: "exit", exitCode: 0 };
    const ran = async ({ commands }) => ({
      output: commands.map((command) => ({ stdout: `ran ${command}`, stderr: "", outcome })),
    });
    const shell = agents.shellTool({ shell: { run: ran } });
    const listed = await run(shell, 'call shell {"commands": ["ls"]}');
    assert.match(listed.finalOutput, /ran ls/);
    await goesOn(shell, listed);
    const edit = async ({ type, path }) => ({ status: "completed", output: `${type} ${path}` });
    const patch = agents.applyPatchTool({ editor: { createFile: edit, updateFile: edit, deleteFile: edit } });
    const calls = [
      'call apply_patch {"type": "create_file", "path": "a.txt", "diff": "+one\\n"}',
      'call apply_patch {"type": "delete_file", "path": "b.txt"}',
    ];
    const changed = await run(patch, calls.join("\n"));
    assert.match(changed.finalOutput, /create_file a\.txt.*delete_file b\.txt/);
    await goesOn(patch, changed);
  }),
};

const notes = mkdtempSync(join(tmpdir(), "antiphon-notes-"));
try {
  writeFileSync(join(notes, "tides.md"), "# Tides\n\nThe spring tide is highest two days after the full moon.\n");
  await against(["--engine", "scripted", "--demo-web", notes], checks);
} finally {
  rmSync(notes, { recursive: true });
}
