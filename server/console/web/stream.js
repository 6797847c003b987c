// Reads the events of responses, and goes on reading when the connection or the server goes away: by the id of the
// response and the number of the last event that was seen.

import { ApiError, Offline, idempotencyKey, online, request, sleep } from "./api.js";

export const TERMINAL = ["completed", "incomplete", "failed", "cancelled"];
const ENDS = new Set(TERMINAL.map((status) => `response.${status}`));
const LASTING = new Set(["model_not_loaded", "model_unavailable", "file_not_read"]); // 503s for somebody to decide on

/** Events of a reply, one after the other. Ends when the reply does. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const raw = block
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (raw && raw !== "[DONE]") yield JSON.parse(raw);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Start a response and read it to its end. Sent again under the same idempotency key until it has begun, so that a
 * server that ends in between carries it out once.
 *
 * handlers: see `follow`; besides, `onStart(id)`, as soon as the response has an id. path: where to, if not to the
 * responses. key: the idempotency key, of a body that may have been sent before.
 */
export async function start(body, handlers, { path = "v1/responses", key = idempotencyKey() } = {}) {
  const headers = { "idempotency-key": key, accept: "text/event-stream" };
  const seen = { after: -1 };
  for (;;) {
    try {
      const reply = await request("POST", path, { body, headers, signal: handlers.signal });
      handlers.onState?.("live");
      if (await read(reply, handlers, seen)) return;
    } catch (error) {
      if (!(await canTryAgain(error, handlers))) throw error;
    }
    handlers.onState?.("reconnecting");
    if (seen.id) return follow(seen.id, handlers, seen.after);
    await online(handlers.signal);
  }
}

/**
 * Read the events of a response from behind `after` on, to its end.
 *
 * handlers: `onEvent(event)`; `onState("live" | "reconnecting")`; `signal` stops it. Raises ApiError
 * for a response without events: deleted, forked, or older than events are kept.
 */
export async function follow(id, handlers, after = -1) {
  const seen = { id, after };
  const headers = { accept: "text/event-stream" };
  for (;;) {
    try {
      const query = { stream: true, starting_after: seen.after };
      const reply = await request("GET", `v1/responses/${id}`, { query, headers, signal: handlers.signal });
      handlers.onState?.("live");
      if (await read(reply, handlers, seen)) return;
      const now = await (await request("GET", `v1/responses/${id}`, { signal: handlers.signal })).json();
      if (TERMINAL.includes(now.status)) return; // its last event was seen before
    } catch (error) {
      if (!(await canTryAgain(error, handlers))) throw error;
    }
    handlers.onState?.("reconnecting");
    await online(handlers.signal);
  }
}

/** Hand the events of a reply on; whether the last one was among them. */
async function read(reply, handlers, seen) {
  try {
    for await (const event of events(reply)) {
      if (typeof event.sequence_number === "number") {
        if (event.sequence_number <= seen.after) continue;
        seen.after = event.sequence_number;
      }
      if (event.response?.id && !seen.id) {
        seen.id = event.response.id;
        handlers.onStart?.(seen.id);
      }
      handlers.onEvent(event);
      if (ENDS.has(event.type)) return true;
    }
  } catch (error) {
    if (handlers.signal?.aborted) throw error;
    if (!(error instanceof TypeError || error.name === "AbortError" || error.name === "NetworkError")) throw error;
  }
  return false;
}

/** Whether to try again after an error, once it may help: as soon as the server is `online`. */
export async function canTryAgain(error, { signal } = {}) {
  if (signal?.aborted) return false;
  if (error instanceof Offline) return true;
  const passing = error instanceof ApiError && (error.status === 503 ? !LASTING.has(error.code) : error.code === "idempotency_in_progress");
  if (passing) await sleep(Math.min((error.retryAfter ?? 0.5) * 1000, 2000));
  return passing;
}
