// Servers for the checks of JavaScript clients: each check runs against one that was started for it and others.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import OpenAI from "openai";

export const MODEL = "antiphon-scripted";

/** What an asynchronous iterable yields, as an array. */
export const all = async (stream) => {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
};

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");
const python = process.env.PYTHON ?? join(root, ".venv", "bin", "python");

/** Runs checks, functions by their names, one after the other, against a server with these flags. */
export async function against(flags, checks) {
  const data = mkdtempSync(join(tmpdir(), "antiphon-js-"));
  const args = ["-m", "server.cli", "serve", "--port", "0", "--data", data, "--log-level", "error", ...flags];
  const server = spawn(python, args, { cwd: root, stdio: ["ignore", "pipe", "inherit"] });
  const gone = new Promise((resolve) => server.once("exit", resolve));
  try {
    const banner = await new Promise((resolve, reject) => {
      server.stdout.once("data", (text) => resolve(String(text)));
      server.once("exit", (code) => reject(new Error(`the server ended with ${code}`)));
    });
    const baseURL = `${banner.match(/http:\/\/\S+/)[0]}/v1`;
    const client = new OpenAI({ apiKey: "unused", baseURL, maxRetries: 0 });
    for (const [name, check] of Object.entries(checks)) {
      await check({ client, baseURL });
      console.log(`ok: ${name}`);
    }
  } finally {
    server.kill();
    await gone;
    rmSync(data, { recursive: true });
  }
}
