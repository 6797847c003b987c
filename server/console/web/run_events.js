// The events of a run, read page by page from where they are kept, with the time of each.

import { useEffect, useState } from "./vendor/standalone.module.js";
import { get, online, sleep } from "./api.js";
import { empty, isOutput, take } from "./fold.js";
import { useRedraw } from "./state.js";
import { canTryAgain } from "./stream.js";
import { hasEnded, pendingOf } from "./turns.js";

const LIVE_MS = 400; // between two looks for new events
const IDLE_MS = 1500; // the same while the run waits for somebody, and while nobody sees the page
const PAGE = 1000; // events, as many as the server gives at once
const DELTA = /\.delta$/;

const encoder = new TextEncoder();

// start: when the first event of the run was made, in Unix seconds; null where the server kept no times.
// groups: the rows, of which those that hold pieces of the same part of an item, one behind the other, are together.
// waits: the pairs of rows between which nothing came but the answer of somebody, or the end instead of one.
const nothing = () => ({ rows: [], groups: [], waits: [], state: empty(), start: undefined, error: null, done: false });

/**
 * The events of a run from behind `after` on, and what they come to.
 *
 * response: as it is stored; nothing is read before it is there, and nothing of a fork, which was not run. turn:
 * whatever has them read anew. whole: called when there may be more in the response than the events say.
 */
export function useEvents(response, after, turn, whole) {
  const redraw = useRedraw();
  const [found, set] = useState(nothing);
  const id = response && !response.forked_from ? response.id : null;
  useEffect(() => {
    const abort = new AbortController();
    const now = nothing();
    set(now);
    if (!id) return undefined;
    read(id, now, { after, ended: hasEnded(response), signal: abort.signal, redraw, whole })
      .catch((error) => {
        if (!abort.signal.aborted) now.error = error;
      })
      .finally(() => {
        now.done = true;
        if (!abort.signal.aborted) redraw();
      });
    return () => abort.abort(new DOMException("left", "AbortError"));
  }, [id, after, turn]);
  return found;
}

/** Read the events of a run to its end. Raises ApiError where they are not kept any more. */
async function read(id, now, { after, ended, signal, redraw, whole }) {
  const page = (query) => again(() => get(`v1/responses/${id}/events`, query, { signal }), signal, whole);
  if (after >= 0) now.start = (await page({ limit: 1 })).times[0];
  for (let last = after; ; ) {
    const { data, times, has_more: more } = await page({ after: last, limit: PAGE });
    if (now.start === undefined && data.length) now.start = times[0];
    for (const [index, event] of data.entries()) add(now, event, times[index], after < 0);
    if (data.length) {
      last = data.at(-1).sequence_number;
      redraw();
    }
    if (more) continue;
    const over = hasEnded(data.at(-1)?.response ?? {});
    if (over && !ended) whole();
    if (over || ended) return;
    const seen = document.visibilityState === "visible";
    await sleep(seen && !pendingOf(now.state.items).size ? LIVE_MS : IDLE_MS);
  }
}

/** Ask until there is a server that answers; `whole` is called if it was away. */
async function again(ask, signal, whole) {
  for (let lost = false; ; lost = true) {
    try {
      const found = await ask();
      if (lost) whole();
      return found;
    } catch (error) {
      if (!(await canTryAgain(error, { signal }))) throw error;
      await online(signal);
    }
  }
}

function add(now, event, at, folds) {
  const raw = JSON.stringify(event);
  const { sequence_number: seq, type, delta } = event;
  const of = DELTA.test(type) ? [type, event.item_id, event.content_index, event.summary_index].join() : null;
  const row = { seq, type, at, raw, of, bytes: encoder.encode(raw).length };
  if (endsWaiting(event, now.state)) now.waits.push([now.rows.at(-1), row]);
  now.rows.push(row);
  let group = now.groups.at(-1);
  if (!of || group?.of !== of) now.groups.push((group = { of, type, rows: [], text: "", bytes: 0 }));
  group.rows.push(row);
  group.bytes += row.bytes;
  if (typeof delta === "string") group.text += delta;
  if (folds) take(now.state, event);
}

function endsWaiting(event, { items }) {
  const answers = event.type === "response.output_item.added" && isOutput(event.item);
  return (answers || hasEnded(event.response ?? {})) && pendingOf(items).size > 0;
}

/** Seconds from the start of a run to an event; null where nobody knows. */
export const timeOf = ({ at }, { start }) => (at && start ? Math.max(0, at - start) : null);

/** Seconds that a run has waited for somebody; NaN where that is not known, as behind the start of a replay. */
export function waited({ rows, waits }, waiting) {
  if (rows[0]?.seq !== 0) return NaN;
  const gap = ([before, next]) => (before.at && next.at ? next.at - before.at : NaN);
  const over = waits.reduce((sum, wait) => sum + gap(wait), 0);
  return waiting ? over + gap([rows.at(-1), { at: Date.now() / 1000 }]) : over;
}
