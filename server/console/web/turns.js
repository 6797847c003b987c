// Turns under way, by conversation. They go on being read while other pages are shown, and are found again after a
// reload, because the server makes them without anybody who reads.

import { get, post } from "./api.js";
import { TERMINAL, follow, start } from "./stream.js";
import { empty, isOutput, take } from "./fold.js";

const turns = new Map();
const listeners = new Set();

/** One response that is being made for a conversation. `input`: the items that it was given. */
class Turn {
  constructor(conversation, input) {
    this.conversation = conversation;
    this.input = input;
    this.id = null;
    this.state = empty();
    this.connection = "live"; // or "reconnecting"
    this.error = null;
    this.ended = false;
    this.abort = new AbortController();
  }

  handlers() {
    return {
      signal: this.abort.signal,
      onStart: (id) => {
        this.id = id;
        tell(this);
      },
      onEvent: ({ event }) => {
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
    turns.set(this.conversation, this);
    tell(this);
    try {
      await reading;
    } catch (error) {
      if (!this.abort.signal.aborted) this.error = error;
    }
    this.ended = true;
    this.connection = "live";
    tell(this);
  }

  /** The calls and approvals that wait for somebody, by the id that answers them. */
  get pending() {
    return pendingOf(this.state.items);
  }
}

/** Which of these items wait for somebody to answer them: their call ids, or for an approval the item's own. */
export function pendingOf(items) {
  const there = items.filter(Boolean);
  const answered = new Set(there.filter(isOutput).map((item) => item.approval_request_id ?? item.call_id));
  const open = there.filter((item) => {
    if (item.type === "mcp_approval_request") return !answered.has(item.id);
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

/** Begin a turn. body: of the request, without what is said here. */
export function begin(conversation, body, input) {
  const turn = new Turn(conversation, input);
  const whole = {
    ...body,
    ...(input.length ? { input } : {}),
    conversation,
    background: true,
    stream: true,
    store: true,
  };
  turn.run(start(whole, turn.handlers()));
  return turn;
}

/** Go on reading a response that is being made, from its first event on. */
export async function resume(conversation, response) {
  if (turns.has(conversation)) return turns.get(conversation);
  const turn = new Turn(conversation, []);
  turn.id = response.id;
  turn.state.response = response;
  turn.state.status = response.status;
  turns.set(conversation, turn);
  const items = await get(`v1/responses/${response.id}/input_items`, { order: "asc", limit: 100 }).catch(() => null);
  turn.input = items?.data ?? [];
  turn.run(follow(response.id, turn.handlers()));
  return turn;
}

/** Stop a turn: the server ends it, and its stream says so. */
export const stop = (turn) => post(`v1/responses/${turn.id}/cancel`, {});

/** Send outputs of tools, or approvals. */
export const answer = (id, outputs) => post(`v1/responses/${id}/tool_outputs`, { tool_outputs: outputs });

export const hasEnded = (response) => TERMINAL.includes(response.status);
