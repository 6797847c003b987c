// Claude Code, Anthropic's agent for the command line, unmodified and without a terminal, in a small git repository: it
// changes a file and runs a command there because of what this server answers. Where the kernel lets it, all of this runs
// in a network of its own, which has nothing but the loopback.

import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { against, MODEL } from "./serving.mjs";

const here = fileURLToPath(import.meta.url);
if (!process.env.IN_A_NETWORK_OF_ITS_OWN && spawnSync("unshare", ["-rn", "true"]).status === 0) {
  const alone = 'ip link set lo up && exec "$0" "$1"';
  const env = { ...process.env, IN_A_NETWORK_OF_ITS_OWN: "1" };
  const { status } = spawnSync("unshare", ["-rn", "sh", "-c", alone, process.execPath, here], { env, stdio: "inherit" });
  process.exit(status ?? 1);
}

const program = join(dirname(here), "node_modules", ".bin", "claude");
const folder = mkdtempSync(join(tmpdir(), "antiphon-claude-"));

/** A repository with one file. `turn(arguments)` is a turn of Claude Code in it: its result. */
function repository(baseURL) {
  const path = mkdtempSync(join(folder, "repository-"));
  const env = {
    ...process.env,
    HOME: folder,
    ANTHROPIC_BASE_URL: baseURL.replace(/\/v1$/, ""),
    ANTHROPIC_API_KEY: "unused",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    CLAUDE_CODE_MAX_RETRIES: "0",
  };
  const run = (file, args) => {
    const stdio = ["ignore", "pipe", "inherit"];
    return execFileSync(file, args, { cwd: path, env, stdio, encoding: "utf8", timeout: 120_000, maxBuffer: 1 << 26 });
  };
  run("git", ["init", "-q"]);
  writeFileSync(join(path, "greet.py"), 'def greet():\n    return "hello"\n');
  const turn = (...args) => {
    const result = JSON.parse(run(program, ["-p", "--output-format", "json", "--permission-mode", "acceptEdits", ...args]));
    assert.equal(result.is_error, false, result.result);
    return result;
  };
  return { file: join(path, "greet.py"), turn };
}

const call = (name, args) => `call ${name} ${JSON.stringify(args)}`;

const checks = {
  async "Claude Code changes a file that it has read, in a session that it goes on with"({ baseURL }) {
    const { file, turn } = repository(baseURL);
    const read = turn(call("Read", { file_path: file }));
    assert.match(read.result, /return "hello"/);
    assert.equal(read.stop_reason, "end_turn");
    assert.ok(read.usage.input_tokens > 10_000 && read.usage.output_tokens > 10);
    const edit = { file_path: file, old_string: "hello", new_string: "goodbye" };
    const edited = turn("--continue", call("Edit", edit));
    assert.match(edited.result, /has been updated/);
    assert.equal(readFileSync(file, "utf8"), 'def greet():\n    return "goodbye"\n');
    assert.equal(edited.session_id, read.session_id);
    assert.equal(turn("--continue", "think hm then say done").result, "done");
  },

  async "Claude Code runs a command, and tells the model of one that fails"({ baseURL }) {
    const { turn } = repository(baseURL);
    const allowed = ["--allowedTools", "Bash"];
    assert.match(turn(call("Bash", { command: "cat greet.py | wc -l" }), ...allowed).result, /The tool said: 2/);
    assert.match(turn(call("Bash", { command: "exit 3" }), ...allowed).result, /error: .*3/);
  },

  async "Claude Code asks for a model by its own name"({ baseURL }) {
    const { turn } = repository(baseURL);
    assert.equal(turn("--model", MODEL, "say hello").result, "hello");
  },
};

try {
  await against(["--engine", "scripted"], checks);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
