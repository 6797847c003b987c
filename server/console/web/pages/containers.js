// Containers: where models run code, and the files that lie there.

import { html } from "../vendor/standalone.module.js";
import { download, get, key, list, remove } from "../api.js";
import { Ago, Button, Id, Loaded, More, Page, State, Sure, fileName, size } from "../elements.js";
import { NamedList } from "../named_list.js";
import { attempt, replace, useList, useWatched } from "../state.js";

const LIST = {
  page: "containers",
  path: "v1/containers",
  title: "Containers",
  noun: "container",
  note: "Each code interpreter has one, with files of its own.",
  columns: [["Memory", "figure hide-narrow", (each) => each.memory_limit]],
  empty: {
    icon: "box",
    title: "No containers",
    text: "One is made when a model first runs code, and goes when it has not been used for a while.",
  },
};

export function Containers({ id }) {
  return id ? html`<${Container} key=${id} id=${id} />` : html`<${NamedList} ...${LIST} />`;
}

function Container({ id }) {
  const owner = useWatched(key);
  const load = async (most) => {
    const [container, files] = await Promise.all([get(`v1/containers/${id}`), list(`v1/containers/${id}/files`, {}, most)]);
    return { container, ...files };
  };
  const loaded = useList(load, [id, owner], 5000);
  const erase = () => attempt(() => remove(`v1/containers/${id}`).then(() => replace("containers")), "Deleted");
  const take = async (file) => {
    if (await attempt(() => remove(`v1/containers/${id}/files/${file.id}`))) loaded.reload();
  };
  return html`<${Page} title=${html`<a class="up" href="#/containers">Containers</a> ${loaded.value?.container.name ?? ""}`}
    actions=${html`<${Id} value=${id} />
      <${Sure} icon="trash" label="Delete container" question="The container is deleted with its files." onYes=${erase} />`}>
    <${Loaded} of=${loaded}>
      ${({ container, data: files }) => html`<dl class="facts">
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
                <td class="main mono"><span class="clip">${fileName(file.path)}</span></td>
                <td class="faint hide-narrow">${file.source}</td>
                <td class="figure">${size(file.bytes)}</td>
                <td class="figure faint hide-narrow"><${Ago} at=${file.created_at} /></td>
                <td class="row-actions">
                  <${Button} icon="save" kind="quiet" label=${`Download ${fileName(file.path)}`} onClick=${() => attempt(() => download(`v1/containers/${id}/files/${file.id}/content`, file.path))} />
                  <${Sure} icon="trash" label=${`Delete ${fileName(file.path)}`} question="The file is deleted." onYes=${() => take(file)} />
                </td>
              </tr>`)}</tbody>
            </table></div><${More} of=${loaded} />`
          : html`<p class="faint">No files lie in it.</p>`}`}
    <//>
  <//>`;
}
