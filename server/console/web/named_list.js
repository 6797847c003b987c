// A list of things that have a name, a page of their own, and a dialog that makes one.

import { html, useState } from "./vendor/standalone.module.js";
import { key, list, post } from "./api.js";
import { Ago, Button, Dialog, Empty, Field, Id, Loaded, More, Page, State } from "./elements.js";
import { go, href, useList, useWatched } from "./state.js";

const EVERY_MS = 4000;

/** A dialog that asks for the name of what `make(name)` makes; it stays, and says why, where that fails. */
export function NameDialog({ title, close, make }) {
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await make(new FormData(event.target).get("name").trim());
      close();
    } catch (error) {
      setProblem(error.message);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} close=${close}>
    <form onSubmit=${submit}><${Field} label="Name"><input name="name" required maxlength="256" /><//>
      ${problem && html`<p class="notice bad" role="alert">${problem}</p>`}
      <footer><button type="submit" class="button primary" disabled=${busy}>Make it</button></footer></form>
  <//>`;
}

// page: of this console. path: of the API. noun: what one of them is called. columns: those between the id and
// the time of the last use, each [heading, class, function of a row]. empty: { icon, title, text }.
export function NamedList({ page, path, title, noun, note, columns, empty }) {
  const owner = useWatched(key);
  const [making, make] = useState(false);
  const loaded = useList((most) => list(path, {}, most), [owner], EVERY_MS);
  return html`<${Page} title=${title} note=${note}
    actions=${html`<${Button} icon="plus" kind="primary" onClick=${() => make(true)}>New ${noun}<//>`}>
    ${making && html`<${NameDialog} title=${`New ${noun}`} close=${() => make(false)} make=${async (name) => go(page, (await post(path, { name })).id)} />`}
    <${Loaded} of=${loaded}>
      ${({ data }) => (data.length
        ? html`<div class="table-frame"><table class="list">
            <thead><tr><th scope="col">Name</th><th scope="col">State</th><th scope="col" class="hide-narrow">Id</th>
              ${columns.map(([heading, style]) => html`<th scope="col" class=${style}>${heading}</th>`)}
              <th scope="col" class="figure">Used</th></tr></thead>
            <tbody>${data.map((each) => html`<tr key=${each.id}>
              <td class="main"><a class="cover clip" href=${href(page, each.id)}>${each.name || "Untitled"}</a></td>
              <td><${State} name=${each.status} /></td>
              <td class="hide-narrow"><${Id} value=${each.id} /></td>
              ${columns.map(([, style, cell]) => html`<td class=${style}>${cell(each)}</td>`)}
              <td class="figure faint"><${Ago} at=${each.last_active_at} /></td>
            </tr>`)}</tbody>
          </table></div><${More} of=${loaded} />`
        : html`<${Empty} icon=${empty.icon} title=${empty.title}>${empty.text}<//>`)}
    <//>
  <//>`;
}
