// Files: what was uploaded, to be attached to messages, searched, or worked on.

import { html, useRef, useState } from "../vendor/standalone.module.js";
import { download, key, list, remove, upload } from "../api.js";
import { Ago, Button, Empty, Id, Loaded, More, Page, Sure, droppedFiles, fileName, size } from "../elements.js";
import { attempt, useList, useWatched } from "../state.js";

export function Files() {
  const owner = useWatched(key);
  const [over, setOver] = useState(false);
  const [busy, setBusy] = useState(0);
  const picker = useRef();
  const loaded = useList((most) => list("v1/files", { order: "desc" }, most), [owner]);
  const bring = async (files) => {
    setBusy(files.length);
    for (const [index, file] of files.entries()) {
      await attempt(() => upload(file), `${fileName(file.name)} is uploaded`, fileName(file.name));
      setBusy(files.length - index - 1);
    }
    loaded.reload();
  };
  const erase = async (file) => {
    if (await attempt(() => remove(`v1/files/${file.id}`), `${fileName(file.filename)} is deleted`)) loaded.reload();
  };
  return html`<div
    class=${`drop ${over ? "over" : ""}`}
    onDragOver=${(event) => (event.preventDefault(), setOver(true))}
    onDragLeave=${() => setOver(false)}
    onDrop=${(event) => (event.preventDefault(), setOver(false), bring(droppedFiles(event.dataTransfer)))}
  >
    <${Page} title="Files" note="Drop files anywhere on this page."
      actions=${html`<input ref=${picker} type="file" multiple hidden onChange=${(event) => (bring([...event.target.files]), (event.target.value = ""))} />
        <${Button} icon="plus" kind="primary" disabled=${busy > 0} onClick=${() => picker.current.click()}>${busy ? `Uploading ${busy}…` : "Upload"}<//>`}>
      <${Loaded} of=${loaded}>
        ${({ data }) => (data.length
          ? html`<div class="table-frame"><table class="list">
                <thead><tr><th scope="col">Name</th><th scope="col" class="hide-narrow">Id</th>
                  <th scope="col" class="hide-narrow">Purpose</th><th scope="col" class="figure">Size</th>
                  <th scope="col" class="figure hide-narrow">Uploaded</th><th scope="col">
                  <span class="out-of-sight">Actions</span></th></tr></thead>
                <tbody>${data.map((file) => html`<tr key=${file.id}>
                  <td class="main"><span class="clip">${fileName(file.filename)}</span></td>
                  <td class="hide-narrow"><${Id} value=${file.id} /></td>
                  <td class="faint hide-narrow">${file.purpose}</td>
                  <td class="figure">${size(file.bytes)}</td>
                  <td class="figure faint hide-narrow"><${Ago} at=${file.created_at} /></td>
                  <td class="row-actions">
                    <${Button} icon="save" kind="quiet" label=${`Download ${fileName(file.filename)}`} onClick=${() => attempt(() => download(`v1/files/${file.id}/content`, file.filename))} />
                    <${Sure} icon="trash" label=${`Delete ${fileName(file.filename)}`} question="The file is deleted, also from the stores that have it." onYes=${() => erase(file)} />
                  </td>
                </tr>`)}</tbody>
              </table></div><${More} of=${loaded} />`
          : html`<${Empty} icon="file" title="No files yet">Attach one to a message, or upload it here.<//>`)}
      <//>
    <//>
  </div>`;
}
