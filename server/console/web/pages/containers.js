// Containers: where models run code, and the files that lie there.

import { html, useState } from "../vendor/standalone.module.js";
import { download, get, key, post, remove } from "../api.js";
import { Ago, Button, Dialog, Empty, Field, Id, Loaded, Page, State, Sure, size } from "../elements.js";
import { attempt, go, href, useLoaded, useWatched } from "../state.js";

export function Containers({ id }) {
  return id ? html`<${Container} key=${id} id=${id} />` : html`<${List} />`;
}

function List() {
  const owner = useWatched(key);
  const [making, make] = useState(false);
  const loaded = useLoaded(async () => (await get("v1/containers", { limit: 100 })).data, [owner], 5000);
  const submit = async (event) => {
    event.preventDefault();
    const name = new FormData(event.target).get("name").trim();
    make(false);
    await attempt(async () => go("containers", (await post("v1/containers", { name })).id));
  };
  return html`<${Page} title="Containers" wide note="Each code interpreter has one, with files of its own."
    actions=${html`<${Button} icon="plus" kind="primary" onClick=${() => make(true)}>New container<//>`}>
    ${making && html`<${Dialog} title="New container" close=${() => make(false)}>
      <form onSubmit=${submit}><${Field} label="Name"><input name="name" required maxlength="256" /><//>
        <footer><button type="submit" class="button primary">Make it</button></footer></form>
    <//>`}
    <${Loaded} of=${loaded}>
      ${(found) => (found.length
        ? html`<div class="table-frame"><table class="list">
            <thead><tr><th scope="col">Name</th><th scope="col">State</th><th scope="col" class="hide-narrow">Id</th>
              <th scope="col" class="figure hide-narrow">Memory</th><th scope="col" class="figure">Used</th></tr>
              </thead>
            <tbody>${found.map((each) => html`<tr key=${each.id}>
              <td class="main"><a class="cover clip" href=${href("containers", each.id)}>${each.name}</a></td>
              <td><${State} name=${each.status} /></td>
              <td class="hide-narrow"><${Id} value=${each.id} /></td>
              <td class="figure hide-narrow">${each.memory_limit}</td>
              <td class="figure faint"><${Ago} at=${each.last_active_at} /></td>
            </tr>`)}</tbody>
          </table></div>`
        : html`<${Empty} icon="box" title="No containers">One is made when a model first runs code, and goes when it has not been used for a while.<//>`)}
    <//>
  <//>`;
}

function Container({ id }) {
  const owner = useWatched(key);
  const load = async () => {
    const [container, files] = await Promise.all([get(`v1/containers/${id}`), get(`v1/containers/${id}/files`, { limit: 100 })]);
    return { container, files: files.data };
  };
  const loaded = useLoaded(load, [id, owner], 5000);
  const erase = () => attempt(() => remove(`v1/containers/${id}`), "Deleted").then((done) => done && go("containers"));
  const take = async (file) => {
    if (await attempt(() => remove(`v1/containers/${id}/files/${file.id}`))) loaded.reload();
  };
  return html`<${Page} wide title=${html`<a class="up" href="#/containers">Containers</a> ${loaded.value?.container.name ?? ""}`}
    actions=${html`<${Id} value=${id} />
      <${Sure} icon="trash" label="Delete container" question="The container is deleted with its files." onYes=${erase} />`}>
    <${Loaded} of=${loaded}>
      ${({ container, files }) => html`<dl class="facts">
          <div><dt>State</dt><dd><${State} name=${container.status} /></dd></div>
          <div><dt>Made</dt><dd><${Ago} at=${container.created_at} /></dd></div>
          <div><dt>Used</dt><dd><${Ago} at=${container.last_active_at} /></dd></div>
          <div><dt>Kept unused</dt><dd>${container.expires_after?.minutes} min</dd></div>
          <div><dt>Memory</dt><dd>${container.memory_limit}</dd></div>
          <div><dt>Network</dt><dd>${container.network_policy?.type}</dd></div>
        </dl>
        <div class="section-head"><h2>Files</h2></div>
        ${files.length
          ? html`<div class="table-frame"><table class="list">
              <thead><tr><th scope="col">Path</th><th scope="col" class="hide-narrow">From</th>
                <th scope="col" class="figure">Size</th><th scope="col" class="figure hide-narrow">Made</th>
                <th scope="col"><span class="out-of-sight">Actions</span></th></tr></thead>
              <tbody>${files.map((file) => html`<tr key=${file.id}>
                <td class="main mono"><span class="clip">${file.path}</span></td>
                <td class="faint hide-narrow">${file.source}</td>
                <td class="figure">${size(file.bytes)}</td>
                <td class="figure faint hide-narrow"><${Ago} at=${file.created_at} /></td>
                <td class="row-actions">
                  <${Button} icon="save" kind="quiet" label=${`Download ${file.path}`} onClick=${() => attempt(() => download(`v1/containers/${id}/files/${file.id}/content`, file.path))} />
                  <${Sure} icon="trash" label=${`Delete ${file.path}`} question="The file is deleted." onYes=${() => take(file)} />
                </td>
              </tr>`)}</tbody>
            </table></div>`
          : html`<p class="faint">No files lie in it.</p>`}`}
    <//>
  <//>`;
}
