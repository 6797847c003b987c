// Codex, the command line agent, unmodified and without a terminal, in a small git repository: it changes a file and
// runs commands there because of what this server answers.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { against, MODEL } from "./serving.mjs";

const program = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "codex");
const folder = mkdtempSync(join(tmpdir(), "antiphon-codex-"));
const env = { ...process.env, CODEX_HOME: folder, OPENAI_API_KEY: "unused" };
const run = (file, args, cwd = folder) => {
  const stdio = ["ignore", "pipe", "pipe"];
  return execFileSync(file, args, { cwd, env, stdio, encoding: "utf8", timeout: 120_000, maxBuffer: 1 << 26 });
};

// As which model Codex is to see that of the server, so that it offers apply_patch: see docs/compatibility.md.
const { models } = JSON.parse(run(program, ["debug", "models", "--bundled"]));
const known = models.find(({ slug }) => slug === "gpt-5.5");
const model = { ...known, slug: MODEL, supports_search_tool: false, input_modalities: ["text"] };

function configure(baseURL, { name = "Local server", websockets = false }) {
  const catalog = join(folder, "models.json");
  writeFileSync(catalog, JSON.stringify({ models: [model] }));
  const settings = [
    `model = "${MODEL}"`,
    `model_catalog_json = "${catalog}"`,
    'model_provider = "local"',
    'approval_policy = "never"',
    'sandbox_mode = "danger-full-access"', // the scripted engine runs what this file says
    'web_search = "disabled"',
    "check_for_update_on_startup = false",
    "[agents]",
    "enabled = false",
    "[analytics]",
    "enabled = false",
    "[model_providers.local]",
    `name = "${name}"`,
    `base_url = "${baseURL}"`,
    'env_key = "OPENAI_API_KEY"',
    'wire_api = "responses"',
    `supports_websockets = ${websockets}`,
  ];
  writeFileSync(join(folder, "config.toml"), settings.join("\n"));
}

/** A repository with one file; name: of the provider; websockets: whether Codex speaks over those. `turn(arguments)` is a turn of Codex in it: the session's id, its items, its words. */
function repository(baseURL, settings = {}) {
  configure(baseURL, settings);
  const path = mkdtempSync(join(folder, "repository-"));
  const git = (...args) => run("git", ["-c", "user.name=A", "-c", "user.email=a@example.com", ...args], path);
  git("init", "-q");
  writeFileSync(join(path, "greet.py"), 'def greet():\n    return "hello"\n');
  git("add", ".");
  git("commit", "-qm", "one");
  const turn = (...args) => {
    const lines = run(program, ["exec", "--json", ...args], path).trim().split("\n");
    const events = lines.map((line) => JSON.parse(line));
    assert.equal(events.at(-1).type, "turn.completed");
    const done = events.filter(({ type }) => type === "item.completed").map(({ item }) => item);
    const items = done.filter(({ type }) => type !== "error"); // notices, of settings that it calls deprecated
    return { session: events[0].thread_id, items, said: items.at(-1).text };
  };
  return { read: (name) => readFileSync(join(path, name), "utf8"), git, turn };
}

const PATCH = [
  "*** Begin Patch",
  "*** Update File: greet.py",
  "@@ def greet():",
  '-    return "hello"',
  '+    return "goodbye"',
  "*** Add File: notes.txt",
  "+one",
  "*** End Patch",
  "",
].join("\n");
const call = (name, args) => `call ${name} ${JSON.stringify(args)}`;
const kinds = (items) => items.map(({ type }) => type);

const checks = {
  async "Codex changes files, and goes on in a session that is resumed"({ baseURL }) {
    const { read, git, turn } = repository(baseURL);
    const { session, items, said } = turn(call("apply_patch", { input: PATCH }));
    assert.deepEqual(kinds(items), ["file_change", "agent_message"]);
    assert.match(said, /Success/);
    assert.equal(read("greet.py"), 'def greet():\n    return "goodbye"\n');
    assert.equal(read("notes.txt"), "one\n");
    assert.equal(git("status", "--short"), " M greet.py\n?? notes.txt\n");

    const resumed = turn("resume", session, call("exec_command", { cmd: "git diff --stat" }));
    assert.deepEqual(kinds(resumed.items), ["command_execution", "agent_message"]);
    assert.match(resumed.items[0].aggregated_output, /1 file changed/);
    assert.match(resumed.said, /1 file changed/);
    assert.equal(turn("resume", session, "think hm then say done").said, "done");
  },

  async "Codex tells the model of a patch that does not fit"({ baseURL }) {
    const { read, turn } = repository(baseURL);
    const { said } = turn(call("apply_patch", { input: PATCH.replace("hello", "hullo") }));
    assert.match(said, /apply_patch verification failed/);
    assert.match(read("greet.py"), /hello/);
  },

  async "Codex runs two commands of one turn"({ baseURL }) {
    const commands = ["echo one", "echo two"].map((cmd) => call("exec_command", { cmd }));
    const { items, said } = repository(baseURL).turn(commands.join("\n"));
    assert.deepEqual(kinds(items), ["command_execution", "command_execution", "agent_message"]);
    assert.match(said, /one.*two/s);
  },

  async "Codex asks for an answer in a shape"({ baseURL }) {
    const schema = join(folder, "schema.json");
    const properties = { a: { type: "string" } };
    writeFileSync(schema, JSON.stringify({ type: "object", properties, required: ["a"], additionalProperties: false }));
    const { said } = repository(baseURL).turn("--output-schema", schema, 'say {"a": "b"}');
    assert.deepEqual(JSON.parse(said), { a: "b" });
  },
};

const compacting = {
  async "Codex has its session compacted, and goes on"({ baseURL }) {
    const { turn } = repository(baseURL, { name: "OpenAI" }); // under this name it sends a compaction_trigger
    const limit = ["-c", "model_auto_compact_token_limit=12000"];
    const { session } = turn(...limit, "My name is Mark.");
    const kept = turn("resume", session, ...limit, "say two");
    assert.equal(kept.said, "two");
    assert.equal(turn("resume", session, ...limit, "say three").said, "three");
    const path = `${baseURL}/organization/usage/completions?start_time=${Math.floor(Date.now() / 1000) - 3600}`;
    const used = (await (await fetch(path)).json()).data.flatMap(({ results }) => results);
    const requests = used.reduce((sum, { num_model_requests }) => sum + num_model_requests, 0);
    assert.ok(requests > 3, `${requests} requests: none was a compaction`);
  },
};

const overSockets = {
  async "Codex speaks over WebSockets alone, warms them up, and goes on from what a connection keeps"({ baseURL }) {
    const { read, turn } = repository(baseURL, { websockets: true });
    const { session, items, said } = turn(call("apply_patch", { input: PATCH }));
    assert.deepEqual(kinds(items), ["file_change", "agent_message"]);
    assert.match(said, /Success/);
    assert.equal(read("greet.py"), 'def greet():\n    return "goodbye"\n');
    assert.equal(turn("resume", session, "think hm then say done").said, "done");
    const page = await (await fetch(new URL("/metrics", baseURL))).text();
    const requests = page.split("\n").filter((line) => /^antiphon_requests_total.*"\/v1\/responses"/.test(line));
    assert.ok(requests.length, page);
    for (const line of requests) assert.match(line, /method="WEBSOCKET"/);
  },
};

const strict = {
  async "Codex offers by default what every server takes"({ baseURL }) {
    const settings = ["web_search='cached'", "agents.enabled=true", "model='other'", "sandbox_mode='read-only'"];
    const { items, said } = repository(baseURL).turn(...settings.flatMap((each) => ["-c", each]), "say hello");
    assert.deepEqual([kinds(items).at(-1), said], ["agent_message", "hello"]);
  },
};

const lenient = {
  async "Codex searches the web"({ baseURL }) {
    const search = call("web_search", { queries: ["spring tide"] });
    const { items, said } = repository(baseURL).turn("-c", 'web_search="live"', search);
    assert.deepEqual(kinds(items), ["web_search", "agent_message"]);
    assert.equal(items[0].query, "spring tide");
    assert.ok(said.includes("([demo.test](https://demo.test/tides.md))"));
  },

  async "Codex offers what it offers without being told of the model, or of a tool that is missing"({ baseURL }) {
    const settings = ["web_search='cached'", "agents.enabled=true", "model='other'"];
    const { items, said } = repository(baseURL).turn(...settings.flatMap((each) => ["-c", each]), "say hello");
    assert.deepEqual([kinds(items).at(-1), said], ["agent_message", "hello"]);
  },
};

try {
  await against(["--engine", "scripted"], { ...checks, ...compacting });
  await against(["--engine", "scripted"], overSockets);
  const notes = mkdtempSync(join(folder, "notes-"));
  writeFileSync(join(notes, "tides.md"), "# Tides\n\nThe spring tide is highest two days after the full moon.\n");
  const names = [MODEL, "other"].flatMap((name) => ["--served-model-name", name]);
  await against(["--engine", "scripted", ...names], strict);
  await against(["--engine", "scripted", "--demo-web", notes, "--unsupported-tools", "ignore", ...names], lenient);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
