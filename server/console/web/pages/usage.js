// Usage: what was used, by model, what it cost, and what is left of limits.

import { html, useState } from "../vendor/standalone.module.js";
import { get, key, limits } from "../api.js";
import { Bars } from "../chart.js";
import { Empty, Loaded, Page, Scrolled, number, short } from "../elements.js";
import { periodWords } from "../limit_words.js";
import { useLoaded, useWatched } from "../state.js";

const RANGES = {
  "24 hours": { seconds: 86_400, width: "1h", bucket: 3600, limit: 24 },
  "7 days": { seconds: 7 * 86_400, width: "1d", bucket: 86_400, limit: 7 },
  "30 days": { seconds: 30 * 86_400, width: "1d", bucket: 86_400, limit: 30 },
};
const APART = { model: "model", project_id: "owner", api_key_id: "key", service_tier: "tier" };
const KINDS = { Requests: "num_model_requests", Input: "input_tokens", Cached: "input_cached_tokens", Output: "output_tokens", Reasoning: "output_reasoning_tokens" };

export function Usage() {
  const owner = useWatched(key);
  const said = useWatched(limits);
  const [name, setName] = useState("24 hours");
  const [by, setBy] = useState("model");
  const range = RANGES[name];
  const load = async () => {
    const now = Math.floor(Date.now() / 1000);
    const start = now - (now % range.bucket) - range.seconds + range.bucket; // the last bucket is the one of now
    const query = { start_time: start, bucket_width: range.width, limit: range.limit };
    const [page, costs] = await Promise.all([
      get("v1/organization/usage/completions", { ...query, "group_by[]": [by] }),
      get("v1/organization/costs", { start_time: start, limit: 31 }).catch(() => ({ data: [] })),
    ]);
    return { buckets: page.data, costs: costs.data };
  };
  const loaded = useLoaded(load, [owner, name, by], 15_000);
  return html`<${Page} title="Usage" note="Tokens and requests, counted once each, also over a crash."
    actions=${html`
      <label><span class="out-of-sight">Told apart by</span><select onChange=${(event) => setBy(event.target.value)}>
        ${Object.entries(APART).map(([value, text]) => html`<option value=${value} selected=${value === by}>by ${text}</option>`)}
      </select></label>
      <div class="filters" role="group" aria-label="Range">${Object.keys(RANGES).map((each) => html`<button type="button" class="filter" aria-pressed=${each === name} onClick=${() => setName(each)}>${each}</button>`)}</div>`}>
    <${Loaded} of=${loaded}>${(found) => html`<${Figures} found=${found} by=${by} width=${range.width} />`}<//>
    <${Left} said=${said} owner=${owner} />
  <//>`;
}

function Figures({ found, by, width }) {
  const results = found.buckets.flatMap((bucket) => bucket.results);
  if (!results.length) return html`<${Empty} icon="usage" title="Nothing was used">In this range no answer has been made.<//>`;
  const nameOf = (result) => result[by] ?? "none";
  const names = [...new Set(results.map(nameOf))];
  const label = (bucket) => {
    const date = new Date(bucket.start_time * 1000);
    return width === "1h"
      ? date.toLocaleTimeString("en", { weekday: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" })
      : date.toLocaleDateString("en", { day: "numeric", month: "short", timeZone: "UTC" });
  };
  const columns = (field) =>
    found.buckets.map((bucket) => ({
      label: label(bucket),
      parts: names.map((name) => ({
        name,
        value: bucket.results.filter((result) => nameOf(result) === name).reduce((sum, result) => sum + field(result), 0),
      })),
    }));
  const total = (list, field) => list.reduce((sum, result) => sum + (result[field] ?? 0), 0);
  const cost = found.costs.flatMap((bucket) => bucket.results);
  return html`
    <div class="stats">
      ${Object.entries(KINDS).map(([name, field]) => html`<div class="stat"><span>${name}</span>
        <strong title=${number(total(results, field))}>${short(total(results, field))}</strong></div>`)}
      ${cost.length > 0 && html`<div class="stat"><span>Cost</span>
        <strong>${total(cost.map((each) => each.amount), "value").toFixed(4)} ${cost[0].amount.currency}</strong>
        </div>`}
    </div>
    <div class="panels">
      <section class="panel-card"><h2>Tokens</h2>
        <${Bars} columns=${columns((result) => (result.input_tokens ?? 0) + (result.output_tokens ?? 0))} names=${names} label="Tokens over time" shown=${number} />
        </section>
      <section class="panel-card"><h2>Requests</h2>
        <${Bars} columns=${columns((result) => result.num_model_requests ?? 0)} names=${names} label="Requests over time" shown=${number} />
        </section>
    </div>
    <${Scrolled} label=${`By ${APART[by]}`}><table class="list">
      <thead><tr>
        <th scope="col">${APART[by]}</th>${Object.keys(KINDS).map((name) => html`<th scope="col" class="figure">${name}</th>`)}</tr>
        </thead>
      <tbody>${names.map((name) => html`<tr><td class="main"><span class="clip">${name}</span>
        </td>${Object.values(KINDS).map((field) => html`<td class="figure">${number(total(results.filter((result) => nameOf(result) === name), field))}</td>`)}</tr>`)}</tbody>
    </table><//>`;
}

/** What the headers of replies say: of all limits on requests, and of all on tokens, the one that is the nearest. */
function Left({ said, owner }) {
  const kinds = ["requests", "tokens"].filter((kind) => `x-ratelimit-limit-${kind}` in said);
  return html`<div class="section-head"><h2>Limits</h2></div>
    ${kinds.length
      ? html`<div class="panels">${kinds.map((kind) => {
          const most = Number(said[`x-ratelimit-limit-${kind}`]);
          const left = Number(said[`x-ratelimit-remaining-${kind}`]);
          const period = periodWords(Number(said[`x-ratelimit-period-${kind}`]));
          return html`<section class="panel-card"><h3>${number(most)} ${kind} ${period}</h3>
            <meter min="0" max=${most} value=${left} aria-label=${`Left of ${kind}`}></meter>
            <p class="faint">${number(left)} left${left < most && html`; all of them again in ${said[`x-ratelimit-reset-${kind}`]}`}</p>
              </section>`;
        })}</div>`
      : html`<p class="faint">${owner ? "This key has no limits" : "There are no limits"} on requests or tokens over time.</p>`}`;
}
