// One run: its timeline as it is written, its items, what it used, and what can be done to it.

import { html, useEffect, useMemo, useState } from "../vendor/standalone.module.js";
import { get, key, list, post, remove } from "../api.js";
import { Ago, Button, Failure, Id, Json, Loaded, More, Page, Scrolled, State, Sure, cancelledFor, number, seconds, survived } from "../elements.js";
import { Item, outputsOf } from "../items.js";
import { useEvents, waited } from "../run_events.js";
import { attempt, go, href, replace, useAttempt, useList, useLoaded, useRedraw, useWatched } from "../state.js";
import { Timeline } from "../timeline.js";
import { answer, answeredOf, hasEnded, noted, pendingOf } from "../turns.js";

const EVERY_MS = 1000; // between two looks at how long it has lasted
const TABS = ["timeline", "items", "input", "usage", "raw"];

export function Run({ id }) {
  const owner = useWatched(key);
  const [after, setAfter] = useState(-1);
  const [turn, setTurn] = useState(0);
  const [tab, setTab] = useState("timeline");
  const loaded = useLoaded(async () => noted(await get(`v1/responses/${id}`)), [id, owner], 0);
  const stored = loaded.value;
  const events = useEvents(stored, after, `${turn} ${owner}`, loaded.reload);
  const input = useList((most) => list(`v1/responses/${id}/input_items`, { order: "asc" }, most), [id, owner]);
  const seen = events.state.response;
  const response = seen && !hasEnded(stored ?? {}) ? { ...stored, ...seen, status: events.state.status, output: events.state.items.filter(Boolean) } : stored;
  const pending = useMemo(() => (response && !hasEnded(response) ? pendingOf(response.output, id) : new Set()), [stored, response?.status, response?.output.length, events.rows.length]);

  const cancel = () => attempt(() => post(`v1/responses/${id}/cancel`, {}), "Cancelled").then(() => loaded.reload());
  const send = (outputs) => attempt(() => answer(id, outputs), "Answered").then(() => loaded.reload());
  const [once, forking] = useAttempt();
  const fork = (body = {}) => once(async () => go("runs", (await post(`v1/responses/${id}/fork`, body)).id), "Forked");
  const erase = () => attempt(() => remove(`v1/responses/${id}`).then(() => replace("runs")), "Deleted");
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
      ${response && html`<${Button} icon="fork" disabled=${forking} onClick=${() => fork()}>Fork<//>`}
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
          ${tab === "timeline" && (response.forked_from
            ? html`<p class="notice">A fork was not run, so it has no events of its own.</p>`
            : html`<${Timeline} id=${id} events=${events} replay=${replay} fork=${(seq) => fork({ starting_after: seq })} after=${after} running=${running} />`)}
          ${tab === "items" && html`<${Items} items=${response.output} pending=${pending} tools=${response.tools} busy=${running} given=${answeredOf(id)} answer=${send} fork=${(item) => fork({ after: item.id })} />`}
          ${tab === "input" && html`<${Loaded} of=${input}>${({ data }) => html`<${Items} items=${data} /><${More} of=${input} />`}<//>`}
          ${tab === "usage" && html`<${Used} usage=${response.forked_from ? null : response.usage} />`}
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
  const ran = !response.forked_from; // else it has the items of another run, and nothing was computed for it
  // A response says of its end only where it has completed; of any other its last event does.
  const end = ended ? events.done && events.rows.at(-1)?.at : Date.now() / 1000;
  const lasted = (response.completed_at ?? (end || NaN)) - response.created_at;
  const waiting = waited(events, state === "waiting");
  const facts = [
    ["State", html`<${State} name=${state} /> ${cancelledFor(response) && html`<span class="faint">${cancelledFor(response)}</span>`} ${survived(response) && html`<span class="faint" title=${OUTLIVED}>${survived(response)}</span>`}`],
    ["Model", response.model],
    ["Begun", html`<${Ago} at=${response.created_at} />`],
    ["Lasted", html`<span title="From the request to the end, with all that it waited for">${ran ? seconds(lasted) : "–"}</span>`],
    ["Tokens", ran && response.usage ? `${number(response.usage.input_tokens)} + ${number(response.usage.output_tokens)}` : "–"],
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

function Items({ items, pending, given, tools, busy, answer: send, fork }) {
  const outputs = outputsOf(items);
  if (!items.length) return html`<p class="faint">Nothing yet.</p>`;
  return html`<div class="item-list">
    ${items.filter(Boolean).map((item, index) => html`<article key=${item.id ?? index} class="item-row">
      <header><span class="faint">${index}</span>
        <strong>${item.type}</strong>${item.role && html`<span class="chip">${item.role}</span>`}<span class="grow">
        </span>
        ${item.id && html`<${Id} value=${item.id} />`}
        ${fork && item.id && !busy && html`<${Button} icon="fork" kind="quiet" label="Fork behind this item" onClick=${() => fork(item)} />`}</header>
      <${Item} item=${item} outputs=${outputs} pending=${pending} given=${given} answer=${send} tools=${tools} busy=${busy} />
      <details class="fold slight"><summary>JSON</summary><${Json} value=${item} label=${`item ${index}`} /></details>
    </article>`)}
  </div>`;
}

function Used({ usage }) {
  if (!usage) return html`<p class="faint">Nothing has been used.</p>`;
  const turns = usage.input_tokens_per_turn ?? [];
  return html`<dl class="facts">
      <div><dt>Input</dt><dd>${number(usage.input_tokens)}</dd></div>
      <div><dt>of it cached</dt><dd>${number(usage.input_tokens_details?.cached_tokens)}</dd></div>
      <div><dt>Output</dt><dd>${number(usage.output_tokens)}</dd></div>
      <div><dt>of it reasoning</dt><dd>${number(usage.output_tokens_details?.reasoning_tokens)}</dd></div>
      <div><dt>Total</dt><dd>${number(usage.total_tokens)}</dd></div>
    </dl>
    ${turns.length > 0 && html`<${Scrolled} label="Generations"><table class="list">
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
    </table><//>`}`;
}
