// A form made of a JSON Schema: objects, lists, choices, texts, numbers and booleans; anything else is written as
// JSON. Nothing is filled in that the schema does not say: what has no value yet is undefined, and its field is required,
// so that a form can be sent when its value is one that JSON can hold.

import { html, useRef, useState } from "./vendor/standalone.module.js";
import { Button } from "./elements.js";

const kindOf = (schema) => {
  if (schema.enum || schema.const !== undefined) return "choice";
  const kinds = Array.isArray(schema.type) ? schema.type.filter((kind) => kind !== "null") : [schema.type];
  const kind = kinds.length === 1 ? kinds[0] : undefined;
  if (kind && kind !== "object") return kind;
  return schema.properties ? "object" : "any"; // an object whose names are not told is written as JSON
};

/** A value that a schema's form begins with: its default, or nothing. */
export function initial(schema) {
  if (schema.default !== undefined) return schema.default;
  if (kindOf(schema) !== "object") return schema.const;
  return Object.fromEntries(
    Object.entries(schema.properties ?? {})
      .filter(([name]) => schema.required?.includes(name))
      .map(([name, each]) => [name, initial(each)]),
  );
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
    case "choice":
      return html`<${Choice} choices=${schema.enum ?? [schema.const]} value=${value} change=${change} label=${label} hint=${hint} />`;
    case "boolean":
      return html`<${Choice} choices=${[true, false]} value=${value} change=${change} label=${label} hint=${hint} />`;
    case "integer":
    case "number":
      return html`<${NumberForm} schema=${schema} value=${value} change=${change} label=${label} hint=${hint} />`;
    case "string":
      return html`<${TextForm} schema=${schema} value=${value} change=${change} label=${label} hint=${hint} />`;
    default:
      return html`<${RawForm} value=${value} change=${change} label=${label} hint=${hint} />`;
  }
}

const Row = ({ label, hint, children }) => html`<label class="field">
  <span>${label}</span>${children}${hint && html`<small class="faint">${hint}</small>`}
</label>`;

function Choice({ choices, value, change, label, hint }) {
  const chosen = choices.findIndex((each) => JSON.stringify(each) === JSON.stringify(value));
  return html`<${Row} label=${label} hint=${hint}>
    <select required onChange=${(event) => change(choices[event.target.selectedIndex - 1])}>
      <option value="" selected=${chosen < 0}>Choose…</option>
      ${choices.map((each, index) => html`<option value=${index} selected=${index === chosen}>${typeof each === "string" ? each : JSON.stringify(each)}</option>`)}
    </select>
  <//>`;
}

const TOO_LARGE = "A form cannot hold a whole number of so many digits: write the output “As text”.";

/** Whether a number is a whole one that may not be the one that was written. */
const isInexact = (number) => Number.isInteger(number) && !Number.isSafeInteger(number);

const hasInexact = (value) => (value && typeof value === "object" ? Object.values(value).some(hasInexact) : isInexact(value));

function NumberForm({ schema, value, change, label, hint }) {
  const [text, setText] = useState(""); // as it was typed: on the way to 1.05 stands 1.0
  const read = (written) => (written === "" || isInexact(Number(written)) ? undefined : Number(written));
  const shown = text !== "" && read(text) === value ? text : value ?? "";
  const write = (event) => {
    setText(event.target.value);
    change(read(event.target.value));
  };
  return html`<${Row} label=${label} hint=${hint}>
    <input
      ref=${(field) => field?.setCustomValidity(isInexact(Number(shown)) ? TOO_LARGE : "")}
      type="number"
      required=${value === undefined}
      step=${kindOf(schema) === "integer" ? 1 : "any"}
      min=${schema.minimum}
      max=${schema.maximum}
      value=${shown}
      onInput=${write}
    />
  <//>`;
}

/** Whether a text is as a schema's pattern wants it, which, unlike an input's, may be found anywhere in it. */
function isLike(pattern, text) {
  try {
    return new RegExp(pattern, "u").test(text);
  } catch {
    return true; // it is written for other readers than this one
  }
}

function TextForm({ schema, value, change, label, hint }) {
  const isLong = (schema.maxLength ?? 1000) > 200 && !schema.pattern && !schema.format;
  const problem = schema.pattern && value !== undefined && !isLike(schema.pattern, value) ? `It does not match ${schema.pattern}` : "";
  const given = {
    ref: (field) => field?.setCustomValidity(problem),
    value: value ?? "",
    required: value === undefined,
    minlength: schema.minLength,
    maxlength: schema.maxLength,
    onInput: (event) => change(event.target.value || undefined),
  };
  return html`<div>
    <${Row} label=${label} hint=${hint}>
      ${isLong ? html`<textarea rows="2" ...${given}></textarea>` : html`<input ...${given} />`}
    <//>
    ${!value && !schema.minLength && html`<${Nothing} what=${`${label} is an empty text`} meant=${value === ""} mean=${(is) => change(is ? "" : undefined)} />`}
  </div>`;
}

/** That an empty text or list is meant, and has not just been left out. */
const Nothing = ({ what, meant, mean, required }) => html`<label class="check">
  <input type="checkbox" required=${required} checked=${meant} onChange=${(event) => mean(event.target.checked)} /><span>${what}</span>
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

let rows = 0;

function ListForm({ schema, value, change, label }) {
  const given = Array.isArray(value) ? value : [];
  const keys = useRef([]).current; // a row keeps its own when one before it is removed
  while (keys.length < given.length) keys.push(++rows);
  const without = (index) => {
    keys.splice(index, 1);
    change(given.length > 1 ? given.filter((_, at) => at !== index) : undefined);
  };
  const of = schema.items ?? {};
  return html`<fieldset>
    <legend>${label}</legend>
    ${given.map(
      (each, index) => html`<div key=${keys[index]} class="with-action">
        <${SchemaForm} schema=${of} name=${`${index + 1}`} value=${each} change=${(next) => change(given.map((old, at) => (at === index ? next : old)))} />
        <${Button} icon="close" kind="quiet" label=${`Remove ${index + 1}`} onClick=${() => without(index)} />
      </div>`,
    )}
    <${Button} kind="quiet" icon="plus" onClick=${() => change([...given, initial(of)])}>Add<//>
    ${!given.length && html`<${Nothing} what=${`${label} is an empty list`} meant=${Array.isArray(value)} mean=${(is) => change(is ? [] : undefined)} required />`}
  </fieldset>`;
}

function RawForm({ value, change, label, hint }) {
  const [text, setText] = useState(() => JSON.stringify(value) ?? "");
  const { problem } = readJson(text);
  const write = (event) => {
    setText(event.target.value);
    change(readJson(event.target.value).value);
  };
  return html`<${Row} label=${`${label} (JSON)`} hint=${hint}>
    <textarea ref=${(field) => field?.setCustomValidity(problem)} rows="2" required value=${text} onInput=${write}></textarea>
  <//>`;
}

/** What a text says in JSON, if anything that can be sent: {value, problem}. */
function readJson(text) {
  if (!text.trim()) return { problem: "" };
  try {
    const value = JSON.parse(text);
    return hasInexact(value) ? { problem: TOO_LARGE } : { value, problem: "" };
  } catch {
    return { problem: "This is no JSON." };
  }
}
