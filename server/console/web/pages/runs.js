// Runs: the responses of a key's owner, by their state, as they change.

import { html, useEffect, useState } from "../vendor/standalone.module.js";
import { get, key, list } from "../api.js";
import { Ago, Empty, Id, Loaded, More, Page, State, isNarrow, number, seconds } from "../elements.js";
import { textOf } from "../fold.js";
import { brief, nameOf } from "../items.js";
import { href, replace, useList, useWatched, route } from "../state.js";

const STATUSES = ["", "in_progress", "queued", "waiting", "completed", "incomplete", "failed", "cancelled"];
const EVERY_MS = 2000;
const PAGE = 30;

export function Runs() {
  const owner = useWatched(key);
  const { query } = useWatched(route);
  const status = STATUSES.includes(query.get("status")) ? query.get("status") : "";
  const load = async (most, before) => {
    const found = before && onTop(await get("v1/responses", { status, limit: PAGE }), before, most);
    return found ?? list("v1/responses", { status }, most);
  };
  const loaded = useList(load, [status, owner], EVERY_MS, PAGE);
  return html`<${Page} title="Runs" note="Every response that is kept, the newest first.">
    <div class="filters" role="group" aria-label="State">
      ${STATUSES.map((each) => html`<button type="button" class="filter" aria-pressed=${each === status} onClick=${() => replace("runs", null, each ? { status: each } : {})}>
        ${each ? html`<${State} name=${each} />` : "all"}
      </button>`)}
    </div>
    <${Loaded} of=${loaded}>
      ${({ data }) => (data.length
        ? html`<${List} data=${data} /><${More} of=${loaded} />`
        : html`<${Empty} icon="runs" title="No runs here">Responses that are made in the chat or by any client of this key appear here.<//>`)}
    <//>
  <//>`;
}

/** The newest rows of a list before those that were behind them, `most` at most; null where the two do not meet. */
function onTop(newest, before, most) {
  if (!newest.has_more) return newest;
  const at = before.data.findIndex(({ id }) => id === newest.last_id);
  if (at < 0) return null;
  const behind = before.data.slice(at + 1);
  const data = [...newest.data, ...behind];
  return { data: data.slice(0, most), has_more: before.has_more || !behind.length || data.length > most };
}

/** What a response came to, in one line. */
export function gist(response) {
  if (response.error) return response.error.message;
  const pending = response.pending_tool_calls?.[0];
  if (pending) return `waits for ${pending.name ?? pending.type}`;
  const items = response.output ?? [];
  const message = [...items].reverse().find((item) => item.type === "message" && textOf(item));
  if (message) return textOf(message).slice(0, 200);
  const last = items[items.length - 1];
  return last ? `${nameOf(last)} ${brief(last)}` : "";
}

const stateOf = (response) => (response.pending_tool_calls?.length ? "waiting" : response.status);

function lasted(response) {
  if (response.completed_at) return seconds(Math.max(response.completed_at - response.created_at, 0));
  return ["in_progress", "queued"].includes(response.status) ? seconds(Date.now() / 1000 - response.created_at) : "–";
}

function List({ data }) {
  const [narrow, setNarrow] = useState(isNarrow());
  useEffect(() => {
    const resized = () => setNarrow(isNarrow());
    window.addEventListener("resize", resized);
    return () => window.removeEventListener("resize", resized);
  }, []);
  if (narrow) {
    return html`<ul class="cards">
      ${data.map((each) => html`<li key=${each.id}><a class="card" href=${href("runs", each.id)}>
        <div class="row"><${State} name=${stateOf(each)} /><span class="grow"></span><small class="faint">
          <${Ago} at=${each.created_at} /></small></div>
        <p class="clip">${gist(each) || html`<span class="faint">nothing yet</span>`}</p>
        <small class="faint">${each.model} · ${number(each.usage?.total_tokens)} tokens · ${lasted(each)}</small>
      </a></li>`)}
    </ul>`;
  }
  return html`<div class="table-frame"><table class="list">
    <thead><tr><th scope="col">State</th><th scope="col">Run</th><th scope="col">Came to</th><th scope="col">Model</th>
      <th scope="col" class="figure">Tokens</th><th scope="col" class="figure" title="From the request to the end, with all that it waited for">Lasted</th>
      <th scope="col" class="figure">Begun</th></tr></thead>
    <tbody>
      ${data.map((each) => html`<tr key=${each.id}>
        <td><${State} name=${stateOf(each)} /></td>
        <td><${Id} value=${each.id} /></td>
        <td class="main">
          <a class="cover clip" href=${href("runs", each.id)} aria-label=${`Run ${each.id}`}>${gist(each) || html`<span class="faint">nothing yet</span>`}</a>
          </td>
        <td class="faint clip">${each.model}</td>
        <td class="figure">${number(each.usage?.total_tokens)}</td>
        <td class="figure">${lasted(each)}</td>
        <td class="figure faint"><${Ago} at=${each.created_at} /></td>
      </tr>`)}
    </tbody>
  </table></div>`;
}
