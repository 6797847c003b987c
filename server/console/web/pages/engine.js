// Engine: what the model does now, from the figures that the server shows to monitors.

import { html, useEffect, useState } from "../vendor/standalone.module.js";
import { isTold, key, request } from "../api.js";
import { Line } from "../chart.js";
import { Failure, Page, Scrolled, State, number, short, size } from "../elements.js";
import { useWatched } from "../state.js";

const EVERY_MS = 2000;
const KEPT = 90; // readings, three minutes of them

/** How it stands with saved KV, by the state that the engine says. */
const SAVED = {
  on: "What is computed is kept for later turns.",
  off: "Nothing is kept on disk: a setting turns it off (kv_disk_bytes, prefix_caching).",
  full: "The disk is full: nothing more is kept until it has room. What is there is still read.",
  slow: "The disk is slower than computing: it is left alone for a while, and then tried again.",
  failed: "The disk fails: it is left alone. The log and antiphon doctor say why.",
  foreign: "The folder belongs to another database, so nothing is kept: this server needs one of its own (kv_disk_folder).",
};

/** Figures in the text format of Prometheus: name -> [{labels, value}]. */
export function readMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match || match[1].endsWith("_bucket")) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((each) => [each[1], each[2]]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** The sum of a figure, of one model alone where one is named. */
const sum = (reading, name, want = {}) =>
  (reading.figures.get(name) ?? [])
    .filter(({ labels }) => Object.entries(want).every(([label, value]) => labels[label] === undefined || labels[label] === value))
    .reduce((total, { value }) => total + value, 0);

/** How fast a counter rises, by the second, from reading to reading. */
const rates = (readings, name, want) =>
  readings.slice(1).map((now, index) => {
    const before = readings[index];
    return Math.max(0, (sum(now, name, want) - sum(before, name, want)) / Math.max((now.at - before.at) / 1000, 0.001));
  });
const values = (readings, name, want) => readings.map((reading) => sum(reading, name, want));

/** The models that a figure is of. */
const modelsOf = (reading, name) => [...new Set((reading?.figures.get(name) ?? []).map(({ labels }) => labels.model))];

export function Engine() {
  const owner = useWatched(key);
  const [readings, set] = useState([]);
  const [error, setError] = useState(null);
  const [model, setModel] = useState("");
  useEffect(() => {
    let gone = false;
    const read = async () => {
      if (document.visibilityState !== "visible") return;
      try {
        const figures = readMetrics(await (await request("GET", "metrics")).text());
        if (gone) return;
        setError(null);
        set((before) => [...before, { at: performance.now(), figures }].slice(-KEPT));
      } catch (problem) {
        if (!gone) setError(problem);
      }
    };
    set([]);
    read();
    const timer = setInterval(read, EVERY_MS);
    return () => {
      gone = true;
      clearInterval(timer);
    };
  }, [owner]);
  const last = readings[readings.length - 1];
  const models = modelsOf(last, "antiphon_engine_running");
  const want = model ? { model } : {};
  return html`<${Page} title="Engine" note="The last three minutes, or since this page was opened, read every two seconds, of all owners together."
    actions=${models.length > 1 && html`<label><span class="out-of-sight">Model</span>
      <select onChange=${(event) => setModel(event.target.value)}>
      <option value="">All models</option>${models.map((each) => html`<option value=${each} selected=${each === model}>${each}</option>`)}</select>
      </label>`}>
    ${error && html`<${Failure} error=${error} />`}
    ${!last && (!error || isTold(error)) && html`<div class="loading" role="status"><i></i><i></i><i></i>
      <span class="out-of-sight">Loading</span></div>`}
    ${last && html`<${Charts} readings=${readings} last=${last} want=${want} />`}
  <//>`;
}

function Charts({ readings, last, want }) {
  const now = (name, more) => sum(last, name, { ...want, ...more });
  const blocks = now("antiphon_engine_kv_blocks");
  const charts = [
    ["Output", rates(readings, "antiphon_engine_output_tokens_total", want), "tokens/s", short],
    ["Prompts", rates(readings, "antiphon_engine_prompt_tokens_total", want), "tokens/s", short],
    ["Running", values(readings, "antiphon_engine_running", want), "requests", number],
    ["Waiting for a place", values(readings, "antiphon_engine_waiting", want), "requests", number],
    ["Steps", rates(readings, "antiphon_engine_steps_total", want), "per second", short],
    ["Streams read", values(readings, "antiphon_sse_readers"), "readers", number],
  ];
  const computed = now("antiphon_engine_prompt_tokens_total");
  const hits = (tier) => now("antiphon_kv_hit_tokens_total", { tier });
  const tiers = [
    { name: "memory", value: hits("pool") },
    { name: "disk", value: hits("disk") },
    { name: "computed", value: Math.max(0, computed - hits("pool") - hits("disk")) },
  ];
  const whole = tiers.reduce((total, tier) => total + tier.value, 0);
  const saved = (last.figures.get("antiphon_kv_disk_state") ?? []).filter(({ labels }) => !want.model || labels.model === want.model);
  const states = ["queued", "running", "waiting"].map((name) => [name, now(`antiphon_runs_${name}`)]);
  return html`
    <div class="stats">
      ${states.map(([name, value]) => html`<a class="stat" href=${`#/runs?status=${name === "running" ? "in_progress" : name}`}>
        <span>Runs ${name}</span><strong>${number(value)}</strong></a>`)}
      <div class="stat"><span>Memory of the process</span>
        <strong>${size(now("process_resident_memory_bytes"))}</strong></div>
      <div class="stat"><span>Connections</span><strong>${number(now("antiphon_http_connections"))}</strong></div>
    </div>
    <${Models} last=${last} />
    <div class="panels small">
      ${charts.map(([title, found, unit, show]) => html`<section class="panel-card chart"><header><h2>${title}</h2><p>
        <strong>${show(found[found.length - 1] ?? 0)}</strong> <span class="faint">${unit}</span></p></header>
        ${found.some((value) => value > 0)
          ? html`<${Line} values=${found} label=${`${title}: ${show(found[found.length - 1] ?? 0)} ${unit}`} />`
          : html`<p class="faint idle">Nothing since this page was opened, or in three minutes.</p>`}</section>`)}
    </div>
    <div class="panels">
      <section class="panel-card"><h2>KV cache in memory</h2>
        ${blocks > 0
          ? html`<${Shares} label="Blocks of the KV cache" parts=${[
              { name: "in use", value: now("antiphon_engine_kv_blocks_used") },
              { name: "kept for prefixes", value: now("antiphon_engine_kv_blocks_cached") },
              { name: "free", value: Math.max(0, blocks - now("antiphon_engine_kv_blocks_used") - now("antiphon_engine_kv_blocks_cached")) },
            ]} />
            <p class="faint">${number(blocks)} blocks, ${size(now("antiphon_engine_kv_bytes"))}</p>`
          : html`<p class="faint">This engine has none.</p>`}</section>
      <section class="panel-card"><h2>Where prompts came from</h2>
        ${whole > 0 ? html`<${Shares} label="Tokens of prompts by tier" parts=${tiers} />
          <p class="faint">${number(whole)} tokens of prompts since the start</p>` : html`<p class="faint">No prompt has been read yet.</p>`}</section>
      <section class="panel-card"><h2>KV on disk</h2>
        ${saved.map(({ labels }) => html`<p key=${labels.model}>${saved.length > 1 && html`${labels.model}: `}${SAVED[labels.state] ?? labels.state}</p>`)}
        ${now("antiphon_kv_disk_bytes_limit") > 0
          ? html`<meter min="0" max=${now("antiphon_kv_disk_bytes_limit") || 1} value=${now("antiphon_kv_disk_bytes")} aria-label="Bytes on disk">
            </meter>
              <p class="faint">${size(now("antiphon_kv_disk_bytes"))} of ${size(now("antiphon_kv_disk_bytes_limit"))}, ${number(now("antiphon_kv_blocks"))} blocks in ${number(now("antiphon_kv_files"))} files</p>`
          : !saved.length && html`<p class="faint">Nothing is kept on disk.</p>`}</section>
    </div>`;
}

/** Every model that the server has, also those that are loaded on demand and are not now. */
function Models({ last }) {
  const onDemand = modelsOf(last, "antiphon_model_loaded");
  const names = [...new Set([...modelsOf(last, "antiphon_engine_running"), ...onDemand])];
  const rows = names.map((model) => {
    const of = (figure) => sum(last, figure, { model });
    const state = !onDemand.includes(model) || of("antiphon_model_loaded") ? "loaded" : of("antiphon_model_load_waiting") ? "loading" : "not loaded";
    const memory = state === "loaded" ? of("antiphon_model_memory_bytes") : 0;
    return html`<tr key=${model}><td class="name">${model}</td><td><${State} name=${state} /></td>
      <td class="figure">${memory ? size(memory) : html`<span class="faint" title=${state === "loaded" ? "In the process of the server" : undefined}>–</span>`}</td>
      <td class="figure">${number(of("antiphon_engine_running"))}</td><td class="figure hide-narrow">${number(of("antiphon_model_load_failures_total"))}</td></tr>`;
  });
  if (!rows.length) return null;
  return html`<${Scrolled} label="Models"><table class="list">
    <thead><tr><th scope="col">Model</th><th scope="col">State</th><th scope="col" class="figure">Memory</th>
      <th scope="col" class="figure">Running</th><th scope="col" class="figure hide-narrow">Failed loads</th></tr></thead>
    <tbody>${rows}</tbody></table><//>`;
}

function Shares({ parts, label }) {
  const whole = parts.reduce((total, part) => total + part.value, 0) || 1;
  const said = parts.map((part) => `${part.name} ${Math.round((part.value / whole) * 100)} %`).join(", ");
  return html`<div class="shares" role="img" aria-label=${`${label}: ${said}`}>
      ${parts.map((part, index) => part.value > 0 && html`<i class=${`c${index}`} style=${{ width: `${(part.value / whole) * 100}%` }}>
        </i>`)}
    </div>
    <ul class="legend">${parts.map((part, index) => html`<li><i class=${`c${index}`} aria-hidden="true">
      </i>${part.name} <span class="faint">${short(part.value)}</span></li>`)}</ul>`;
}
