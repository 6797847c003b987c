// The one way to the server: requests with the key of this tab, errors as one class, and what the replies say of
// limits. Nothing here knows of pages.

const KEY = "antiphon.key";
const OWNER = "antiphon.owner"; // for whom the server has answered, as it has said
const LOCAL = "local"; // whose everything is that is made without a key
const PROFILE = { "x-antiphon-profile": "openai" }; // official names of events, also where a server has older ones

/** Where the server's paths begin, also behind a proxy that shows it under a path of its own. */
export const base = new URL(".", document.baseURI);

/** An error that the server answered with; `code` and `param` are those of its body. */
export class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message || `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.param = error?.param ?? null;
    this.retryAfter = retryAfter;
  }
}

/** What `connection` is, by what a server says that is starting or ending, as opposed to one of which a part cannot answer
 * now. */
const PHASES = new Map([["not_ready", "starting"], ["draining", "ending"], ["engine_dead", "ending"]]);

const isAway = (error) => error instanceof Offline || PHASES.has(error.code);

/** Whether an error is told above all pages already: by `connection`, or by `refused`. */
export const isTold = (error) => isAway(error) || error.status === 401;

/** The server could not be reached, or went away in the middle of its answer. */
export class Offline extends Error {
  constructor() {
    super("The server cannot be reached.");
  }
}

/** A value that components can watch. */
export function watched(value) {
  const listeners = new Set();
  return {
    get: () => value,
    set(next) {
      if (next === value) return;
      value = next;
      for (const listener of [...listeners]) listener(next);
    },
    watch(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/** "online", "offline", or of a server that answers, and takes nothing new: "starting" or "ending". */
export const connection = watched("online");
/** The key of this tab; empty where none is needed or none was given. */
export const key = watched(sessionStorage.getItem(KEY) || "");
/** Set to the server's words when it has refused a request for want of a good key. */
export const refused = watched(null);
/** What the latest reply with such headers said of limits, by the headers' names. */
export const limits = watched({});

/** Use another key, or none. owner: whose it is, if that is known. What this tab has of another owner goes: what is shown
 * and read, and what is kept. */
export function useKey(value, owner = null) {
  const former = key.get();
  const formerOwner = sessionStorage.getItem(OWNER);
  const isFirst = !former && !formerOwner; // of what is kept, the server has heard nothing
  if (isFirst || value === former || (owner && owner === formerOwner)) {
    keep(value, owner);
    refused.set(null);
    limits.set({});
    return key.set(value);
  }
  window.addEventListener("pagehide", () => {
    // At the very end, behind which nothing of the page is kept any more.
    for (const name of Object.keys(sessionStorage)) if (name.startsWith("antiphon.")) sessionStorage.removeItem(name);
    keep(value, owner);
  });
  history.replaceState(null, "", /^#\/\w+|$/.exec(location.hash)[0] || "#/chat"); // the same page, of nothing in particular
  location.reload();
}

function keep(value, owner) {
  for (const [name, kept] of [[KEY, value], [OWNER, owner]]) {
    if (kept) sessionStorage.setItem(name, kept);
    else sessionStorage.removeItem(name);
  }
}

export function url(path, query = {}) {
  const made = new URL(path.replace(/^\//, ""), base);
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "") made.searchParams.append(name, each);
    }
  }
  return made;
}

/** A fetch with the key. Raises ApiError for a refusal, Offline where nothing answers, and Error where it is the browser that
 * cannot send a form. */
export async function request(method, path, { query, body, form, headers, signal, as } = {}) {
  const sent = { ...PROFILE, ...headers };
  const own = as ?? key.get();
  if (own) sent.authorization = `Bearer ${own}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let reply;
  try {
    reply = await fetch(url(path, query), {
      method,
      headers: sent,
      body: form ?? (body === undefined ? undefined : JSON.stringify(body)),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (form && (await standing()) === "online") throw new Error("The file cannot be read. It may have changed since it was chosen.");
    lost();
    throw new Offline();
  }
  const error = reply.ok ? null : new ApiError(reply.status, (await reply.json().catch(() => ({}))).error, after(reply));
  if (error && isAway(error)) lost(PHASES.get(error.code));
  else if (connection.get() === "offline") connection.set("online"); // one that ends answers what it can, to the last
  note(reply);
  if (!error && as === undefined && path.startsWith("v1/")) { // other paths need no key anywhere
    refused.set(null);
    if (!own) sessionStorage.setItem(OWNER, LOCAL);
  }
  if (!error) return reply;
  if (reply.status === 401 && as === undefined) refused.set(error.message);
  throw error;
}

function after(reply) {
  const seconds = Number(reply.headers.get("retry-after"));
  return Number.isFinite(seconds) && seconds > 0 ? seconds : null;
}

function note(reply) {
  const said = {};
  for (const [name, value] of reply.headers) {
    if (name.startsWith("x-ratelimit-")) said[name] = value;
  }
  if (Object.keys(said).length) limits.set({ ...limits.get(), ...said });
}

/** What `connection` is now. */
async function standing() {
  try {
    const reply = await fetch(url("ready"), { cache: "no-store", credentials: "omit" });
    if (reply.ok) return "online";
    const { error } = await reply.json().catch(() => ({}));
    return PHASES.get(error?.code) ?? "starting";
  } catch {
    return "offline";
  }
}

let asking = false;

/** Ask until the server is ready again; readers wait for `connection` instead of each asking by itself. */
async function lost(state = "offline") {
  connection.set(state);
  if (asking) return;
  asking = true;
  for (let wait = 250; connection.get() !== "online"; wait = Math.min(wait * 1.5, 3000)) {
    await sleep(wait);
    connection.set(await standing());
  }
  asking = false;
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Resolves when the server can be reached, at once if it can now. */
export function online(signal) {
  return new Promise((resolve, reject) => {
    if (connection.get() === "online") return resolve();
    const stop = connection.watch((state) => {
      if (state !== "online") return;
      stop();
      resolve();
    });
    signal?.addEventListener("abort", () => {
      stop();
      reject(signal.reason);
    });
  });
}

const json = async (...args) => (await request(...args)).json();
export const get = (path, query, more) => json("GET", path, { query, ...more });
export const post = (path, body, more) => json("POST", path, { body, ...more });
export const remove = (path, more) => json("DELETE", path, more);

/** The first rows of a list, `most` at most, page by page: `data`, and whether it `has_more`. */
export async function list(path, query, most) {
  const data = [];
  for (let after; ; ) {
    const page = await get(path, { ...query, limit: Math.min(most - data.length, 100), after });
    data.push(...page.data);
    if (!page.has_more || data.length >= most) return { data, has_more: page.has_more };
    after = page.last_id;
  }
}

/** A fresh name for a request that may have to be sent again. */
export function idempotencyKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `console-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** Upload a file; its official object. */
export function upload(file, purpose = "user_data") {
  const form = new FormData();
  form.append("purpose", purpose);
  form.append("file", file, file.name || "file");
  return json("POST", "v1/files", { form });
}

/** Have the browser save what stands at a path, which it could not ask for with a key by itself. */
export async function download(path, name) {
  save(await (await request("GET", path)).blob(), name);
}

/** Have the browser save bytes as a file. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.split("/").pop() || "file";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
