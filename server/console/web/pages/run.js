// One run: its timeline as it is written, its items, what it used, and what can be done to it.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/standalone.module.js";
import { Offline, get, key, post, remove, save, sleep } from "../api.js";
import { Ago, Button, Failure, Id, Json, Loaded, Page, State, Sure, number, seconds, size, survived } from "../elements.js";
import { empty, isOutput, take } from "../fold.js";
import { Item, outputsOf } from "../items.js";
import { follow } from "../stream.js";
import { attempt, go, href, useLoaded, useRedraw, useWatched } from "../state.js";
import { answer, hasEnded, pendingOf } from "../turns.js";

const EVERY_MS = 1000;
const ROW = 28; // pixels of a row of the timeline, as in the stylesheet
const TABS = ["timeline", "items", "input", "usage", "raw"];

// waits: the pairs of rows between which nothing came but the answer of somebody, or the end instead of one.
const nothing = () => ({ rows: [], waits: [], state: empty(), clock: null, error: null, done: false });

/** The events of a run from behind `after` on, what they come to, and when they were made. */
function useEvents(id, after, turn, whole) {
  const redraw = useRedraw();
  const [found, set] = useState(nothing);
  useEffect(() => {
    const abort = new AbortController();
    const now = nothing();
    let lost = false;
    set(now);
    const handlers = {
      signal: abort.signal,
      onState: (state) => {
        if (state === "live" && lost) whole(); // whether another process has taken it up
        lost = state !== "live";
      },
      onEvent: ({ event, raw, bytes }) => {
        const row = { seq: event.sequence_number, type: event.type, came: Date.now() / 1000, bytes, raw };
        if (endsWaiting(event, now.state)) now.waits.push([now.rows.at(-1), row]);
        now.rows.push(row);
        if (after < 0) take(now.state, event);
        redraw();
      },
    };
    tell(id, now, after, abort.signal, redraw).catch(() => {}); // then a timeline without times
    follow(id, handlers, after)
      .catch((error) => {
        if (!abort.signal.aborted) now.error = error;
      })
      .finally(() => {
        now.done = true;
        if (!abort.signal.aborted) {
          redraw();
          whole();
        }
      });
    return () => abort.abort(new DOMException("left", "AbortError"));
  }, [id, after, turn]);
  return found;
}

function endsWaiting(event, { items }) {
  const answers = event.type === "response.output_item.added" && isOutput(event.item);
  return (answers || hasEnded(event.response ?? {})) && pendingOf(items).size > 0;
}

/**
 * Keep `events.clock`: the times of the events that have come, which their stream does not tell. Ends with them.
 *
 * clock: `start`, when the run's first event was made; `times`, by the numbers of events; `ahead`, how far the clock
 * here was ahead of the server's, for events whose time is not known yet; and from which number on those are live.
 */
async function tell(id, events, after, signal, redraw) {
  const page = (query) => get(`v1/responses/${id}/events`, query, { signal });
  const [oldest, newest] = await Promise.all(["asc", "desc"].map((order) => page({ order, limit: 1 })));
  if (!oldest.data.length) return;
  const known = Number(newest.last_id);
  const clock = (events.clock = { start: oldest.times[0], times: [], ahead: 0, live: known + 1 });
  for (let told = after; !signal.aborted; ) {
    if (told < Math.max(known, events.rows.at(-1)?.seq ?? -1)) {
      const found = await page({ after: told, limit: 1000 }).catch((error) => {
        if (!(error instanceof Offline)) throw error;
      });
      for (const [index, event] of (found?.data ?? []).entries()) clock.times[event.sequence_number] = found.times[index];
      if (found?.data.length) told = Number(found.last_id);
      const seen = events.rows.findLast(({ seq }) => seq >= clock.live && clock.times[seq]);
      if (seen) clock.ahead = seen.came - clock.times[seen.seq];
      redraw();
      if (found?.has_more) continue;
    } else if (events.done) return;
    await sleep(EVERY_MS);
  }
}

/** Seconds from the start of a run to an event; null where nobody knows. */
function timeOf({ seq, came }, clock) {
  if (!clock?.start) return null;
  const time = clock.times[seq] ?? (seq >= clock.live ? came - clock.ahead : null);
  return time && Math.max(0, time - clock.start);
}

/** Seconds that a run has waited for somebody; NaN where that is not known, as behind the start of a replay. */
function waited({ rows, waits, clock }, waiting) {
  if (rows[0]?.seq !== 0) return NaN;
  const gap = ([before, next]) => (timeOf(next, clock) ?? NaN) - timeOf(before, clock);
  const over = waits.reduce((sum, wait) => sum + gap(wait), 0);
  return waiting ? over + gap([rows.at(-1), { seq: Infinity, came: Date.now() / 1000 }]) : over;
}

const since = (time) => {
  if (time === null) return "";
  if (time < 1) return `${Math.round(time * 1000)} ms`;
  return time < 600 ? `${time.toFixed(2)} s` : seconds(time);
};

export function Run({ id }) {
  const owner = useWatched(key);
  const [after, setAfter] = useState(-1);
  const [turn, setTurn] = useState(0);
  const [tab, setTab] = useState("timeline");
  const loaded = useLoaded(() => get(`v1/responses/${id}`), [id, owner], 0);
  const events = useEvents(id, after, `${turn} ${owner}`, loaded.reload);
  const input = useLoaded(async () => (await get(`v1/responses/${id}/input_items`, { order: "asc", limit: 100 })).data, [id, owner]);
  const stored = loaded.value;
  const seen = events.state.response;
  const response = seen && !hasEnded(stored ?? {}) ? { ...stored, ...seen, status: events.state.status, output: events.state.items.filter(Boolean) } : stored;
  const pending = useMemo(() => (response && !hasEnded(response) ? pendingOf(response.output) : new Set()), [response?.status, response?.output.length, events.rows.length]);

  const cancel = () => attempt(() => post(`v1/responses/${id}/cancel`, {}), "Cancelled").then(() => loaded.reload());
  const fork = (body = {}) => attempt(async () => go("runs", (await post(`v1/responses/${id}/fork`, body)).id), "Forked");
  const erase = () => attempt(() => remove(`v1/responses/${id}`), "Deleted").then((done) => done && go("runs"));
  const replay = (number_) => {
    setAfter(number_ - 1);
    setTurn(turn + 1);
    setTab("timeline");
  };
  const state = pending.size ? "waiting" : response?.status;
  const running = response && !hasEnded(response);
  return html`<${Page}
    title=${html`<a class="up" href="#/runs">Runs</a> <span class="mono">${id.slice(0, 14)}…</span>`}
    actions=${html`
      ${running && html`<${Button} icon="stop" onClick=${cancel}>Cancel<//>`}
      ${response && html`<${Button} icon="fork" onClick=${() => fork()}>Fork<//>`}
      ${response && html`<${Sure} icon="trash" label="Delete run" question="The response, its events and what only it refers to are deleted." onYes=${erase} />`}
    `}
  >
    <${Loaded} of=${loaded}>
      ${() => html`
        <${Facts} response=${response} state=${state} events=${events} />
        ${response.error && html`<${Failure} error=${response.error} />`}
        <div class="tabs" role="tablist" aria-label="Parts of the run">
          ${TABS.map((name) => html`<button type="button" role="tab" id=${`tab-${name}`} aria-controls="panel" aria-selected=${name === tab} tabindex=${name === tab ? 0 : -1}
            onClick=${() => setTab(name)}
            onKeyDown=${(event) => {
              const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
              if (!step) return;
              const next = TABS[(TABS.indexOf(name) + step + TABS.length) % TABS.length];
              setTab(next);
              document.getElementById(`tab-${next}`).focus();
            }}>${name}${name === "timeline" && events.rows.length > 0 && html`<small>${number(events.rows.length)}</small>`}</button>`)}
        </div>
        <div id="panel" role="tabpanel" aria-labelledby=${`tab-${tab}`} tabindex="0" class="panel">
          ${tab === "timeline" && html`<${Timeline} id=${id} events=${events} replay=${replay} fork=${(seq) => fork({ starting_after: seq })} after=${after} running=${running} />`}
          ${tab === "items" && html`<${Items} items=${response.output} pending=${pending} tools=${response.tools} busy=${running} answer=${(outputs) => attempt(() => answer(id, outputs))} fork=${(item) => fork({ after: item.id })} />`}
          ${tab === "input" && html`<${Loaded} of=${input}>${(items) => html`<${Items} items=${items} />`}<//>`}
          ${tab === "usage" && html`<${Used} usage=${response.usage} />`}
          ${tab === "raw" && html`<${Json} value=${response} label="the response" />`}
        </div>
      `}
    <//>
  <//>`;
}

const OUTLIVED = "The server ended while this was being made, and it went on from where it was";

function Facts({ response, state, events }) {
  const redraw = useRedraw();
  const ended = hasEnded(response);
  useEffect(() => {
    const timer = ended ? null : setInterval(redraw, EVERY_MS);
    return () => clearInterval(timer);
  }, [ended]);
  const lasted = (response.completed_at ?? (ended ? NaN : Date.now() / 1000)) - response.created_at;
  const waiting = waited(events, state === "waiting");
  const facts = [
    ["State", html`<${State} name=${state} /> ${survived(response) && html`<span class="faint" title=${OUTLIVED}>${survived(response)}</span>`}`],
    ["Model", response.model],
    ["Begun", html`<${Ago} at=${response.created_at} />`],
    ["Lasted", html`<span title="From the request to the end, with all that it waited for">${seconds(lasted)}</span>`],
    ["Tokens", response.usage ? `${number(response.usage.input_tokens)} + ${number(response.usage.output_tokens)}` : "–"],
    ["Id", html`<${Id} value=${response.id} />`],
  ];
  if (waiting > 0) facts.splice(4, 0, ["of it waiting", html`<span title="For outputs of functions and for approvals">${seconds(waiting)}</span>`]);
  if (response.attempt) facts.push(["Attempt", html`<span title="How often a model was given it">${response.attempt}</span>`]);
  if (response.conversation) facts.push(["Conversation", html`<a href=${href("chat", response.conversation.id)}>open</a>`]);
  if (response.previous_response_id) facts.push(["Goes on from", html`<a href=${href("runs", response.previous_response_id)}>open</a>`]);
  if (response.forked_from) facts.push(["Forked from", html`<a href=${href("runs", response.forked_from.response_id)}>open</a>`]);
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd>
    </div>`)}</dl>`;
}

/** The events, of which only those in sight are drawn. */
function Timeline({ id, events, replay, fork, after, running }) {
  const box = useRef();
  const [top, setTop] = useState(0);
  const [picked, pick] = useState(null);
  const [from, setFrom] = useState(String(after + 1));
  const [filter, setFilter] = useState("");
  const following = useRef(true);
  const rows = useMemo(
    () => (filter ? events.rows.filter((row) => row.type.includes(filter)) : events.rows),
    [filter, events.rows, events.rows.length],
  );
  const height = box.current?.clientHeight || 480;
  const first = Math.max(0, Math.floor(top / ROW) - 10);
  const shown = rows.slice(first, first + Math.ceil(height / ROW) + 20);
  const bytes = events.rows.reduce((sum, row) => sum + row.bytes, 0);
  const largest = Math.max(1, ...shown.map((row) => row.bytes));
  useEffect(() => {
    if (running && following.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [rows.length]);
  const scrolled = (event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.target;
    following.current = scrollHeight - scrollTop - clientHeight < ROW * 2;
    setTop(scrollTop);
  };
  const keys = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !rows.length) return;
    event.preventDefault();
    const at = rows.indexOf(picked);
    const next = Math.min(rows.length - 1, Math.max(0, at + step));
    pick(rows[next]);
    const y = next * ROW;
    if (y < box.current.scrollTop) box.current.scrollTop = y;
    else if (y + ROW > box.current.scrollTop + height) box.current.scrollTop = y + ROW - height;
  };
  const submit = (event) => {
    event.preventDefault();
    replay(Math.max(0, Number(from) || 0));
  };
  const keep = () => save(new Blob(rows.map((row) => `${row.raw}\n`), { type: "application/jsonl" }), `${id}.jsonl`);
  if (events.error) return html`<${NoEvents} error=${events.error} />`;
  return html`<div class=${`timeline ${picked ? "picked" : ""}`}>
    <div class="timeline-bar">
      <form class="replay" onSubmit=${submit}>
        <label>Replay from <input type="number" min="0" step="1" value=${from} onInput=${(event) => setFrom(event.target.value)} aria-label="Replay from event" />
          </label>
        <button type="submit" class="button small"><span>Replay</span></button>
      </form>
      <input type="search" placeholder="Filter by type" aria-label="Filter events by type" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <span class="faint" role="status">${number(events.rows.length)} events, ${size(bytes)}${events.done ? "" : ", live"}</span>
      <${Button} icon="save" kind="quiet" label="Save these events, one a line" onClick=${keep} />
    </div>
    <div class="events" ref=${box} onScroll=${scrolled} onKeyDown=${keys} tabindex="0" role="listbox" aria-label="Events" aria-activedescendant=${picked ? `event-${picked.seq}` : undefined}>
      <div class="events-inner" style=${{ height: `${rows.length * ROW}px` }}>
        ${shown.map((row, index) => html`<div
          key=${row.seq}
          id=${`event-${row.seq}`}
          class=${`event ${kindOf(row.type)}`}
          style=${{ transform: `translateY(${(first + index) * ROW}px)` }}
          role="option"
          aria-selected=${picked === row}
          onClick=${() => pick(picked === row ? null : row)}
        >
          <span class="seq">${row.seq}</span>
          <span class="at">${since(timeOf(row, events.clock))}</span>
          <span class="type clip">${row.type.replace(/^response\./, "")}</span>
          <span class="bar" aria-hidden="true"><i style=${{ width: `${Math.max(2, (row.bytes / largest) * 100)}%` }}>
            </i></span>
          <span class="bytes">${size(row.bytes)}</span>
        </div>`)}
      </div>
    </div>
    ${picked && html`<aside class="event-detail" aria-label=${`Event ${picked.seq}`}>
      <div class="row"><strong>Event ${picked.seq}</strong><span class="grow"></span>
        <${Button} icon="again" kind="quiet" onClick=${() => replay(picked.seq)}>Replay from here<//>
        <${Button} icon="fork" kind="quiet" onClick=${() => fork(picked.seq)}>Fork here<//>
        <${Button} icon="close" kind="quiet" label="Close" onClick=${() => pick(null)} /></div>
      <${Json} value=${picked.raw} label=${`event ${picked.seq}`} />
    </aside>`}
  </div>
  ${events.clock && html`<p class="faint small-print">${events.clock.start ? "Times are counted from the first event of the run." : "An earlier version of the server made this run, and kept no times of its events."}</p>`}`;
}

function NoEvents({ error }) {
  if (error.code === "no_events") return html`<p class="notice">A fork was not run, so it has no events of its own.</p>`;
  if (error.code === "events_expired") return html`<p class="notice">The events of this run are not kept any more. Everything else of it is here.</p>`;
  return html`<${Failure} error=${error} />`;
}

const kindOf = (type) => {
  if (/\.(failed|error)$/.test(type) || type === "error") return "bad";
  if (/\.delta$/.test(type)) return "delta";
  if (/^response\.(created|queued|in_progress|completed|incomplete|cancelled)$/.test(type)) return "whole";
  return "step";
};

function Items({ items, pending, tools, busy, answer: send, fork }) {
  const outputs = outputsOf(items);
  if (!items.length) return html`<p class="faint">Nothing yet.</p>`;
  return html`<div class="item-list">
    ${items.filter(Boolean).map((item, index) => html`<article key=${item.id ?? index} class="item-row">
      <header><span class="faint">${index}</span>
        <strong>${item.type}</strong>${item.role && html`<span class="chip">${item.role}</span>`}<span class="grow">
        </span>
        ${item.id && html`<${Id} value=${item.id} />`}
        ${fork && item.id && !busy && html`<${Button} icon="fork" kind="quiet" label="Fork behind this item" onClick=${() => fork(item)} />`}</header>
      <${Item} item=${item} outputs=${outputs} pending=${pending} answer=${send} tools=${tools} busy=${busy} />
      <details class="fold slight"><summary>JSON</summary><${Json} value=${item} label=${`item ${index}`} /></details>
    </article>`)}
  </div>`;
}

function Used({ usage }) {
  if (!usage) return html`<p class="faint">Nothing has been used yet.</p>`;
  const turns = usage.input_tokens_per_turn ?? [];
  return html`<dl class="facts">
      <div><dt>Input</dt><dd>${number(usage.input_tokens)}</dd></div>
      <div><dt>of it cached</dt><dd>${number(usage.input_tokens_details?.cached_tokens)}</dd></div>
      <div><dt>Output</dt><dd>${number(usage.output_tokens)}</dd></div>
      <div><dt>of it reasoning</dt><dd>${number(usage.output_tokens_details?.reasoning_tokens)}</dd></div>
      <div><dt>Total</dt><dd>${number(usage.total_tokens)}</dd></div>
    </dl>
    ${turns.length > 0 && html`<div class="table-frame"><table class="list">
      <thead><tr><th scope="col">Generation</th><th scope="col" class="figure">Input</th>
        <th scope="col" class="figure">Cached</th><th scope="col" class="figure">Output</th>
        <th scope="col" class="figure">Tool outputs</th></tr></thead>
      <tbody>${turns.map((_, index) => html`<tr>
        <td>${index + 1}</td>
        <td class="figure">${number(usage.input_tokens_per_turn[index])}</td>
        <td class="figure">${number(usage.cached_tokens_per_turn?.[index])}</td>
        <td class="figure">${number(usage.output_tokens_per_turn?.[index])}</td>
        <td class="figure">${number(usage.tool_output_tokens_per_turn?.[index])}</td>
      </tr>`)}</tbody>
    </table></div>`}`;
}
