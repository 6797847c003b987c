// Small charts, drawn as SVG: a line over time, and bars of a few kinds.

import { html } from "./vendor/standalone.module.js";

/** A line of the latest values. label: what it says to those who do not see it. */
export function Line({ values, label, most }) {
  const top = Math.max(most ?? 0, ...values, 1e-9);
  const step = 200 / Math.max(values.length - 1, 1);
  const at = (value, index) => `${(index * step).toFixed(1)},${(46 - (value / top) * 42).toFixed(1)}`;
  const points = values.map(at);
  return html`<svg class="line" viewBox="0 0 200 48" preserveAspectRatio="none" role="img" aria-label=${label}>
    ${points.length > 1 && html`<polygon points=${`0,48 ${points.join(" ")} ${((values.length - 1) * step).toFixed(1)},48`} />
      <polyline points=${points.join(" ")} />`}
  </svg>`;
}

/** Bars of columns, each a stack. columns: [{label, parts: [{name, value}]}]. names: the order of the parts. */
export function Bars({ columns, names, label, shown }) {
  const top = Math.max(...columns.map((column) => column.parts.reduce((sum, part) => sum + part.value, 0)), 1);
  const width = 100 / Math.max(columns.length, 1);
  return html`<figure class="bars">
    <p class="bar-top faint">${shown(top)}</p>
    <svg viewBox="0 0 100 40" preserveAspectRatio="none" role="img" aria-label=${label}>
      ${columns.map((column, index) => {
        let y = 40;
        return column.parts.map((part) => {
          const height = (part.value / top) * 40;
          y -= height;
          return html`<rect x=${index * width + width * 0.12} width=${width * 0.76} y=${y} height=${height} class=${`c${names.indexOf(part.name) % 6}`}>
            <title>${`${column.label}: ${part.name} ${shown(part.value)}`}</title></rect>`;
        });
      })}
    </svg>
    <figcaption class="bar-ends faint"><span>${columns[0]?.label}</span>
      <span>${columns[columns.length - 1]?.label}</span></figcaption>
    ${names.length > 0 && html`<ul class="legend">${names.map((name, index) => html`<li>
      <i class=${`c${index % 6}`} aria-hidden="true"></i>${name}</li>`)}</ul>`}
  </figure>`;
}
