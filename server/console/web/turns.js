// Turns under way, by conversation. The server makes them without anybody who reads, so one is read only while it is
// shown: a browser has few connections to one server, and those are shared by all of its tabs.

import { get, post } from "./api.js";
import { TERMINAL, follow, start } from "./stream.js";
import { empty, isOutput, take } from "./fold.js";

const HIDDEN_MS = 15_000; // after which a tab that nobody sees gives its connection back

const turns = new Map();
const listeners = new Set();

/** One response that is being made for a conversation, of which null is one that is not made yet. `input`: the items that
 * it was given. */
class Turn {
  constructor(conversation, input, model = null) {
    this.conversation = conversation;
    this.input = input;
    this.model = model; // as it was asked for
    this.before = null; // the turn that was shown before it, and may not be among what is stored yet
    this.id = null;
    this.state = empty();
    this.connection = "live"; // or "reconnecting"
    this.error = null;
    this.ended = false;
    /** Resolves when it has begun, to null, or to the error for which it has not. */
    this.begun = new Promise((resolve) => {
      this.told = resolve;
    });
    this.after = -1; // the last event that was seen
    this.abort = new AbortController();
  }

  handlers() {
    return {
      signal: this.abort.signal,
      onStart: (id) => {
        this.id = id;
        this.told(null);
        tell(this);
      },
      onEvent: (event) => {
        this.after = event.sequence_number ?? this.after;
        take(this.state, event);
        tell(this);
      },
      onState: (connection) => {
        this.connection = connection;
        tell(this);
      },
    };
  }

  async run(reading) {
    const { signal } = this.abort;
    const before = turns.get(this.conversation);
    if (before !== this) this.before = before?.ended && !before.error ? before : null;
    turns.set(this.conversation, this);
    tell(this);
    try {
      await reading;
    } catch (error) {
      if (signal.aborted) return; // nobody reads on, and the server makes it all the same
      this.error = error;
    }
    this.told(this.error);
    this.ended = true;
    this.connection = "live";
    tell(this);
  }

  /** Stop reading, if what is being made can be found again. */
  pause() {
    if (this.id && !this.ended) this.abort.abort(new DOMException("paused", "AbortError"));
  }

  /** Read on behind the last event that was seen. */
  unpause() {
    if (!this.abort.signal.aborted || this.ended) return;
    this.abort = new AbortController();
    this.run(follow(this.id, this.handlers(), this.after));
  }

  /** The calls and approvals that wait for somebody, by the id that answers them. */
  get pending() {
    return pendingOf(this.state.items, this.id);
  }
}

const answers = new Map();

/** The ids of the calls of a response whose answers the server has, and does not have among the items yet: it waits until
 * all calls that were made at once are answered. */
export function answeredOf(id) {
  if (!answers.has(id)) answers.set(id, new Set());
  return answers.get(id);
}

const keyOf = (each) => each.approval_request_id ?? each.call_id;

/** The ids of the calls that a response says it waits for; null where it says nothing of them. */
export const namedOf = ({ pending_tool_calls: calls }) => calls && new Set(calls.map(keyOf));

/** Remember which calls of a response are answered, be it by somebody else; the response. */
export function noted(response) {
  const named = namedOf(response);
  for (const id of named ? pendingOf(response.output) : []) if (!named.has(id)) answeredOf(response.id).add(id);
  return response;
}

/** Which of these items wait for somebody to answer them: their call ids, or for an approval the item's own. id: of the
 * response that made them. */
export function pendingOf(items, id = null) {
  const there = items.filter(Boolean);
  const answered = new Set([...there.filter(isOutput).map(keyOf), ...answeredOf(id)]);
  const open = there.filter((item) => {
    if (item.type === "mcp_approval_request") return !answered.has(item.id);
    if (item.environment?.type === "container_reference") return false; // the server carries it out
    return CLIENT_CALLS.has(item.type) && item.status === "completed" && !answered.has(item.call_id);
  });
  return new Set(open.map((item) => (item.type === "mcp_approval_request" ? item.id : item.call_id)));
}

const CLIENT_CALLS = new Set([
  "function_call", "custom_tool_call", "shell_call", "local_shell_call", "apply_patch_call", "computer_call",
]);

function tell(turn) {
  for (const listener of [...listeners]) listener(turn);
}

/** Call a function with every turn that changes; returns what ends that. */
export function watchTurns(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export const turnOf = (conversation) => turns.get(conversation) ?? null;
export const forget = (turn) => turns.get(turn.conversation) === turn && turns.delete(turn.conversation);

/** Stop reading the turn of a conversation that is not shown any more. */
export function leave(conversation) {
  const turn = turns.get(conversation);
  if (!turn?.id || turn.ended) return;
  turn.pause();
  turns.delete(conversation);
}

let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  const all = [...turns.values()];
  if (document.visibilityState === "visible") for (const turn of all) turn.unpause();
  else hiding = setTimeout(() => all.forEach((turn) => turn.pause()), HIDDEN_MS);
});

/** Begin a turn. conversation: its id; or, while it is being made, what resolves to its id: until the turn is `moved` there
 * it is that of the conversation null. body: of the request, without what is said here. key: its idempotency key, if it may
 * have been sent. */
export function begin(conversation, body, input, key) {
  const turn = new Turn(typeof conversation === "string" ? conversation : null, input, body.model);
  const begun = async () => {
    const whole = {
      ...body,
      ...(input.length ? { input } : {}),
      conversation: await conversation,
      background: true,
      stream: true,
      store: true,
    };
    return start(whole, turn.handlers(), { key });
  };
  turn.run(begun());
  return turn;
}

/** Have a turn shown in the conversation that was made for it. */
export function moved(turn, conversation) {
  forget(turn);
  turn.conversation = conversation;
  turns.set(conversation, turn);
  tell(turn);
}

/** Answer the calls of a response that has ended with them: the response that goes on from it is the next turn. */
export function goOn(conversation, id, outputs) {
  const turn = new Turn(conversation, []);
  const path = `v1/responses/${id}/tool_outputs`;
  turn.run(start({ tool_outputs: outputs, stream: true }, turn.handlers(), { path }));
  return turn;
}

/** Go on reading a response that is being made, from its first event on. */
export async function resume(conversation, response) {
  if (turns.has(conversation)) return turns.get(conversation);
  const turn = new Turn(conversation, []);
  turn.id = noted(response).id;
  turn.state.response = response;
  turn.state.status = response.status;
  turns.set(conversation, turn);
  const items = await get(`v1/responses/${response.id}/input_items`, { order: "asc", limit: 100 }).catch(() => null);
  turn.input = items?.data ?? [];
  if (turns.get(conversation) !== turn) return turn; // left in the meantime
  turn.run(follow(response.id, turn.handlers()));
  return turn;
}

/** Stop a turn: the server ends it, and its stream says so. */
export const stop = (turn) => post(`v1/responses/${turn.id}/cancel`, {});

/** Send outputs of tools, or approvals. */
export async function answer(id, outputs) {
  try {
    await post(`v1/responses/${id}/tool_outputs`, { tool_outputs: outputs });
    for (const each of outputs) answeredOf(id).add(keyOf(each));
  } finally {
    await get(`v1/responses/${id}`).then(noted, () => null); // somebody else may have answered, too
  }
}

export const hasEnded = (response) => TERMINAL.includes(response.status);
