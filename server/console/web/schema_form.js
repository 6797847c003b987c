// A form made of a JSON Schema: objects, lists, choices, texts, numbers and booleans; anything else is written as
// JSON. The value is always one that JSON can hold.

import { html, useState } from "./vendor/standalone.module.js";
import { Button } from "./elements.js";

const kindOf = (schema) => {
  if (schema.enum || schema.const !== undefined) return "choice";
  const kinds = Array.isArray(schema.type) ? schema.type.filter((kind) => kind !== "null") : [schema.type];
  const kind = kinds.length === 1 ? kinds[0] : undefined;
  if (kind) return kind;
  return schema.properties ? "object" : "any";
};

/** A value that a schema's form begins with. */
export function initial(schema) {
  if (schema.default !== undefined) return schema.default;
  switch (kindOf(schema)) {
    case "choice":
      return schema.const ?? schema.enum[0];
    case "object":
      return Object.fromEntries(
        Object.entries(schema.properties ?? {})
          .filter(([name]) => schema.required?.includes(name))
          .map(([name, each]) => [name, initial(each)]),
      );
    case "array":
      return [];
    case "boolean":
      return false;
    case "integer":
    case "number":
      return schema.minimum ?? 0;
    case "string":
      return "";
    default:
      return null;
  }
}

/** The form. change(value) is called with every change. */
export function SchemaForm({ schema, value, change, name }) {
  const label = schema.title ?? name;
  const hint = schema.description;
  switch (kindOf(schema)) {
    case "object":
      return html`<${ObjectForm} schema=${schema} value=${value} change=${change} label=${label} />`;
    case "array":
      return html`<${ListForm} schema=${schema} value=${value} change=${change} label=${label} />`;
    case "choice": {
      const choices = schema.enum ?? [schema.const];
      const pick = (event) => change(choices[event.target.selectedIndex]);
      return html`<${Row} label=${label} hint=${hint}>
        <select onChange=${pick}>${choices.map((each) => html`<option selected=${each === value}>${String(each)}</option>`)}</select>
      <//>`;
    }
    case "boolean":
      return html`<label class="check">
        <input type="checkbox" checked=${value === true} onChange=${(event) => change(event.target.checked)} />
          <span>${label}</span>
      </label>`;
    case "integer":
    case "number":
      return html`<${Row} label=${label} hint=${hint}>
        <input
          type="number"
          required
          step=${kindOf(schema) === "integer" ? 1 : "any"}
          min=${schema.minimum}
          max=${schema.maximum}
          value=${value}
          onInput=${(event) => event.target.value !== "" && change(Number(event.target.value))}
        />
      <//>`;
    case "string":
      return html`<${Row} label=${label} hint=${hint}>
        ${(schema.maxLength ?? 1000) > 200 && !schema.pattern && !schema.format
          ? html`<textarea rows="2" value=${value ?? ""} minlength=${schema.minLength} maxlength=${schema.maxLength} onInput=${(event) => change(event.target.value)}>
            </textarea>`
          : html`<input value=${value ?? ""} pattern=${schema.pattern} maxlength=${schema.maxLength} onInput=${(event) => change(event.target.value)} />`}
      <//>`;
    default:
      return html`<${RawForm} value=${value} change=${change} label=${label} hint=${hint} />`;
  }
}

const Row = ({ label, hint, children }) => html`<label class="field">
  <span>${label}</span>${children}${hint && html`<small class="faint">${hint}</small>`}
</label>`;

function ObjectForm({ schema, value, change, label }) {
  const given = value && typeof value === "object" ? value : {};
  const without = (name) => Object.fromEntries(Object.entries(given).filter(([each]) => each !== name));
  return html`<fieldset>
    <legend>${label}</legend>
    ${Object.entries(schema.properties ?? {}).map(([name, each]) => {
      const needed = schema.required?.includes(name);
      const there = name in given;
      if (!there && !needed) {
        return html`<${Button} key=${name} kind="quiet" icon="plus" onClick=${() => change({ ...given, [name]: initial(each) })}>${name}<//>`;
      }
      return html`<div key=${name} class="with-action">
        <${SchemaForm} schema=${each} name=${name} value=${given[name]} change=${(next) => change({ ...given, [name]: next })} />
        ${!needed && html`<${Button} icon="close" kind="quiet" label=${`Leave out ${name}`} onClick=${() => change(without(name))} />`}
      </div>`;
    })}
  </fieldset>`;
}

function ListForm({ schema, value, change, label }) {
  const given = Array.isArray(value) ? value : [];
  const of = schema.items ?? {};
  return html`<fieldset>
    <legend>${label}</legend>
    ${given.map(
      (each, index) => html`<div key=${index} class="with-action">
        <${SchemaForm} schema=${of} name=${`${index + 1}`} value=${each} change=${(next) => change(given.map((old, at) => (at === index ? next : old)))} />
        <${Button} icon="close" kind="quiet" label=${`Remove ${index + 1}`} onClick=${() => change(given.filter((_, at) => at !== index))} />
      </div>`,
    )}
    <${Button} kind="quiet" icon="plus" onClick=${() => change([...given, initial(of)])}>Add<//>
  </fieldset>`;
}

function RawForm({ value, change, label, hint }) {
  const [text, setText] = useState(() => JSON.stringify(value));
  const write = (event) => {
    setText(event.target.value);
    try {
      change(JSON.parse(event.target.value));
      event.target.setCustomValidity("");
    } catch {
      event.target.setCustomValidity("This is no JSON.");
    }
  };
  return html`<${Row} label=${`${label} (JSON)`} hint=${hint}><textarea rows="2" value=${text} onInput=${write}>
    </textarea><//>`;
}
