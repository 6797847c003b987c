// Vector stores: what is in them, and a search of one.

import { html, useState } from "../vendor/standalone.module.js";
import { get, key, list, post, remove } from "../api.js";
import { Ago, Button, Icon, Id, Loaded, More, Page, State, Sure, fileName, number, size } from "../elements.js";
import { NamedList } from "../named_list.js";
import { attempt, replace, useList, useLoaded, useWatched } from "../state.js";

const EVERY_MS = 4000;
const KNOWN = 500; // files whose names are asked for at once, and that can be added

const LIST = {
  page: "stores",
  path: "v1/vector_stores",
  title: "Vector stores",
  noun: "store",
  note: "Documents that a model searches and cites.",
  columns: [
    ["Files", "figure hide-narrow", (each) => number(each.file_counts.total)],
    ["Size", "figure", (each) => size(each.usage_bytes)],
  ],
  empty: { icon: "store", title: "No stores yet", text: "Make one, put files into it, and let a model search them." },
};

export function Stores({ id }) {
  return id ? html`<${Store} key=${id} id=${id} />` : html`<${NamedList} ...${LIST} />`;
}

function Store({ id }) {
  const owner = useWatched(key);
  const store = useLoaded(() => get(`v1/vector_stores/${id}`), [id, owner], EVERY_MS);
  const files = useList((most) => list(`v1/vector_stores/${id}/files`, {}, most), [id, owner], EVERY_MS);
  const known = useList((most) => list("v1/files", { order: "desc" }, most), [owner], 0, KNOWN);
  const [hits, setHits] = useState(null);
  const [busy, setBusy] = useState(false);
  const names = Object.fromEntries((known.value?.data ?? []).map((file) => [file.id, fileName(file.filename)]));
  const there = new Set((files.value?.data ?? []).map((file) => file.id));
  const [chosen, choose] = useState("");
  const add = async (event) => {
    event.preventDefault();
    if (!(await attempt(() => post(`v1/vector_stores/${id}/files`, { file_id: chosen })))) return;
    choose("");
    files.reload();
  };
  const take = async (file) => {
    if (await attempt(() => remove(`v1/vector_stores/${id}/files/${file.id}`))) files.reload();
  };
  const search = async (event) => {
    event.preventDefault();
    const query = new FormData(event.target).get("query").trim();
    if (!query) return;
    setBusy(true);
    await attempt(async () => setHits((await post(`v1/vector_stores/${id}/search`, { query, max_num_results: 10 })).data));
    setBusy(false);
  };
  const erase = () => attempt(() => remove(`v1/vector_stores/${id}`).then(() => replace("stores")), "Deleted");
  return html`<${Page} title=${html`<a class="up" href="#/stores">Vector stores</a> ${store.value?.name ?? ""}`}
    actions=${html`<${Id} value=${id} />
      <${Sure} icon="trash" label="Delete store" question="The store is deleted. Its files stay." onYes=${erase} />`}>
    <${Loaded} of=${store}>
      ${(found) => html`<dl class="facts">
        <div><dt>State</dt><dd><${State} name=${found.status} /></dd></div>
        <div><dt>Files</dt><dd>${number(found.file_counts.total)}</dd></div>
        <div><dt>being read</dt><dd>${number(found.file_counts.in_progress)}</dd></div>
        <div><dt>Size</dt><dd>${size(found.usage_bytes)}</dd></div>
        ${found.embedding && html`<div><dt>Vectors</dt>
          <dd>${found.embedding.completed} of ${found.embedding.total}</dd></div>`}
      </dl>`}
    <//>
    <form class="search-row" onSubmit=${search} role="search">
      <input name="query" type="search" required placeholder="Search this store" aria-label="Search this store" />
      <button type="submit" class="button primary" disabled=${busy}><${Icon} name="search" /><span>Search</span>
        </button>
    </form>
    ${hits && html`<section aria-label="Results" aria-live="polite">
      ${hits.map((hit) => html`<article class="hit"><header><strong class="clip">${fileName(hit.filename)}</strong>
        <span class="faint">${hit.score.toFixed(3)}</span></header>
        <p>${hit.content.map((part) => part.text).join("\n").slice(0, 800)}</p></article>`)}
      ${!hits.length && html`<p class="faint">Nothing was found.</p>`}
    </section>`}
    <div class="section-head"><h2>Files</h2>
      <form class="row" onSubmit=${add}>
        <select aria-label="Add a file" onChange=${(event) => choose(event.target.value)}>
          <option value="" selected=${!chosen}>Add a file…</option>
          ${(known.value?.data ?? []).filter((file) => !there.has(file.id)).map((file) => html`<option value=${file.id} selected=${file.id === chosen}>${fileName(file.filename)}</option>`)}
        </select>
        <button type="submit" class="button small" disabled=${!chosen}>Add</button>
        ${known.value?.has_more && html`<${Button} kind="quiet" onClick=${known.more}>List older files<//>`}
      </form></div>
    <${Loaded} of=${files}>
      ${({ data }) => (data.length
        ? html`<div class="table-frame"><table class="list">
            <thead><tr><th scope="col">Name</th><th scope="col">State</th>
              <th scope="col" class="figure hide-narrow">Size</th><th scope="col" class="figure hide-narrow">Added</th>
              <th scope="col"><span class="out-of-sight">Actions</span></th></tr></thead>
            <tbody>${data.map((file) => html`<tr key=${file.id}>
              <td class="main">
                <span class="clip">${names[file.id] ?? file.id}</span>${file.last_error && html`<small class="bad-text">${file.last_error.message}</small>`}</td>
              <td><${State} name=${file.status} /></td>
              <td class="figure hide-narrow">${size(file.usage_bytes)}</td>
              <td class="figure faint hide-narrow"><${Ago} at=${file.created_at} /></td>
              <td class="row-actions">
                <${Sure} icon="trash" label="Take out of the store" yes="Take out" question="The file leaves this store, and stays among the files." onYes=${() => take(file)} />
                </td>
            </tr>`)}</tbody>
          </table></div><${More} of=${files} />`
        : html`<p class="faint">No files are in it yet. Upload them under <a href="#/files">Files</a>, and add them here.</p>`)}
    <//>
  <//>`;
}

