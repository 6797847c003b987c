// The timeline of a run: its events, with the pieces of a text in one row that opens.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/standalone.module.js";
import { save } from "./api.js";
import { Button, Copy, Failure, Icon, Json, number, seconds, size } from "./elements.js";
import { timeOf } from "./run_events.js";
import { useRedraw } from "./state.js";

const ROW = 28; // pixels of a row, as in the stylesheet
const SHOWN = 40_000; // characters of a text

const since = (time) => {
  if (time === null) return "";
  if (time < 1) return `${Math.round(time * 1000)} ms`;
  return time < 600 ? `${time.toFixed(2)} s` : seconds(time);
};

/** What stands in a row: {group}, for pieces of a text, or {row}, a single event; {within}: the open group it is of. */
const lineOf = (group) => (group.rows.length > 1 ? { group } : { row: group.rows[0] });
const firstOf = ({ row, group }) => row ?? group.rows[0];
const keyOf = (line) => `${line.row ? "" : "group-"}${firstOf(line).seq}`;

/** The events, of which only those in sight are drawn. */
export function Timeline({ id, events, replay, fork, after, running }) {
  const box = useRef();
  const redraw = useRedraw();
  const opened = useRef(new Set()); // groups whose events are shown one by one
  const [top, setTop] = useState(0);
  const [picked, pick] = useState(null);
  const [from, setFrom] = useState(String(after + 1));
  const [filter, setFilter] = useState("");
  const following = useRef(true);
  const lines = events.groups
    .filter((group) => group.type.includes(filter))
    .flatMap((group) => {
      const line = lineOf(group);
      return opened.current.has(group) ? [line, ...group.rows.map((row) => ({ row, within: group }))] : [line];
    });
  const at = picked ? lines.findIndex((line) => keyOf(line) === keyOf(picked)) : -1;
  const height = box.current?.clientHeight || 480;
  const first = Math.max(0, Math.floor(top / ROW) - 10);
  const shown = lines.slice(first, first + Math.ceil(height / ROW) + 20);
  const bytes = useMemo(() => events.rows.reduce((sum, row) => sum + row.bytes, 0), [events.rows, events.rows.length]);
  const largest = Math.max(1, ...shown.map(({ row, group }) => (row ?? group).bytes));
  useEffect(() => {
    if (running && following.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines.length]);
  const scrolled = (event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.target;
    following.current = scrollHeight - scrollTop - clientHeight < ROW * 2;
    setTop(scrollTop);
  };
  const open = (group, wanted = !opened.current.has(group)) => {
    if (wanted) opened.current.add(group);
    else opened.current.delete(group);
    redraw();
  };
  const keys = (event) => {
    const unfolds = { ArrowRight: true, ArrowLeft: false }[event.key];
    const group = picked?.group ?? picked?.within;
    if (unfolds !== undefined && group) {
      event.preventDefault();
      open(group, unfolds);
      return unfolds ? undefined : pick({ group });
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !lines.length) return undefined;
    event.preventDefault();
    const next = Math.min(lines.length - 1, Math.max(0, at + step));
    pick(lines[next]);
    const y = next * ROW;
    if (y < box.current.scrollTop) box.current.scrollTop = y;
    else if (y + ROW > box.current.scrollTop + height) box.current.scrollTop = y + ROW - height;
    return undefined;
  };
  const clicked = (event, line) => {
    if (event.target.closest(".unfold")) open(line.group);
    else pick(picked && keyOf(picked) === keyOf(line) ? null : line);
  };
  const submit = (event) => {
    event.preventDefault();
    replay(Math.max(0, Number(from) || 0));
  };
  const keep = () => {
    const wanted = events.rows.filter((row) => row.type.includes(filter));
    save(new Blob(wanted.map((row) => `${row.raw}\n`), { type: "application/jsonl" }), `${id}.jsonl`);
  };
  if (events.error) return html`<${NoEvents} error=${events.error} />`;
  return html`<div class=${`timeline ${picked ? "picked" : ""}`}>
    <div class="timeline-bar">
      <form class="replay" onSubmit=${submit}>
        <label>Replay from <input type="number" min="0" step="1" value=${from} onInput=${(event) => setFrom(event.target.value)} aria-label="Replay from event" />
          </label>
        <button type="submit" class="button small"><span>Replay</span></button>
      </form>
      <input type="search" placeholder="Filter by type" aria-label="Filter events by type" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <span class="faint" role="status">${number(events.rows.length)} events, ${size(bytes)}${events.done ? "" : ", live"}</span>
      <${Button} icon="save" kind="quiet" label="Save these events, one a line" onClick=${keep} />
    </div>
    <div class="events" ref=${box} onScroll=${scrolled} onKeyDown=${keys} tabindex="0" role="tree" aria-label="Events" aria-activedescendant=${at < 0 ? undefined : `event-${keyOf(picked)}`}>
      <div class="events-inner" style=${{ height: `${lines.length * ROW}px` }}>
        ${shown.map((line, index) => {
          const { group, row } = line;
          const { seq, type } = firstOf(line);
          const unfolded = group && opened.current.has(group);
          return html`<div
            key=${keyOf(line)}
            id=${`event-${keyOf(line)}`}
            class=${`event ${kindOf(type)} ${line.within ? "within" : ""}`}
            style=${{ transform: `translateY(${(first + index) * ROW}px)` }}
            role="treeitem"
            aria-level=${line.within ? 2 : 1}
            aria-expanded=${group ? unfolded : undefined}
            aria-selected=${at === first + index}
            onClick=${(event) => clicked(event, line)}
          >
            <span class="seq">${seq}</span>
            <span class="at">${since(timeOf(firstOf(line), events))}</span>
            <span class="what clip">
              ${group && html`<span class="unfold"><${Icon} name=${unfolded ? "down" : "right"} /></span>`}
              <span class="type">${type.replace(/^response\./, "")}</span>
              ${group && html`<span class="pieces">×${number(group.rows.length)}, until ${since(timeOf(group.rows.at(-1), events)) || group.rows.at(-1).seq}</span>
                <span class="text">${group.text.slice(0, 200)}</span>`}
            </span>
            <span class="bar" aria-hidden="true"><i style=${{ width: `${Math.max(2, ((row ?? group).bytes / largest) * 100)}%` }}>
              </i></span>
            <span class="bytes">${size((row ?? group).bytes)}</span>
          </div>`;
        })}
      </div>
    </div>
    ${picked && html`<${Detail} line=${picked} unfolded=${opened.current.has(picked.group)} open=${open} replay=${replay} fork=${fork} close=${() => pick(null)} />`}
  </div>
  ${events.start !== undefined && html`<p class="faint small-print">${events.start ? "Times are counted from the first event of the run." : "An earlier version of the server made this run, and kept no times of its events."}</p>`}`;
}

/** An event as it is stored, or the text of a group of them. */
function Detail({ line, unfolded, open, replay, fork, close }) {
  const { group, row } = line;
  const seq = firstOf(line).seq;
  const last = row ?? group.rows.at(-1);
  const name = group ? `Events ${seq} to ${last.seq}` : `Event ${seq}`;
  return html`<aside class="event-detail" aria-label=${name}>
    <div class="row wraps"><strong>${name}</strong><span class="grow"></span>
      ${group && html`<${Button} icon=${unfolded ? "down" : "right"} kind="quiet" onClick=${() => open(group)}>${unfolded ? "In one row" : "One by one"}<//>`}
      <${Button} icon="again" kind="quiet" onClick=${() => replay(seq)}>Replay from here<//>
      <${Button} icon="fork" kind="quiet" onClick=${() => fork(last.seq)}>Fork here<//>
      <${Button} icon="close" kind="quiet" label="Close" onClick=${close} /></div>
    ${row
      ? html`<${Json} value=${row.raw} label=${`event ${seq}`} />`
      : html`<div class="json"><${Copy} text=${group.text} label="Copy the text" />
          <pre tabindex="0" role="region" aria-label="Text of these events">${group.text.slice(0, SHOWN)}</pre></div>`}
  </aside>`;
}

function NoEvents({ error }) {
  if (error.code === "events_expired") return html`<p class="notice">The events of this run are not kept any more. Everything else of it is here.</p>`;
  return html`<${Failure} error=${error} />`;
}

const kindOf = (type) => {
  if (/\.(failed|error)$/.test(type) || type === "error") return "bad";
  if (/\.delta$/.test(type)) return "delta";
  if (/^response\.(created|queued|in_progress|completed|incomplete|cancelled)$/.test(type)) return "whole";
  return "step";
};
