// Text of models as rich text. HTML and mathematics in it are shown as they were written. Everything goes through
// DOMPurify, which hands over nodes and never markup; what is left of a link opens elsewhere and tells that page nothing,
// and images are shown only if they are in the text.

import { html, useLayoutEffect, useRef } from "./vendor/standalone.module.js";
import { Lexer, Marked, Parser, Renderer, Tokenizer } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const MOST_MARKDOWN = 64_000; // characters of one stretch without a break: what is longer is shown as it is
const MOST_MARKS = 16_000; // of them outside of blocks of code: what lists and tables cost to read grows with the square
const MOST_INLINE = 4_000; // characters of one paragraph: what its marks cost to read grows with the square, or faster
const STRETCH = 2_000; // characters after which a break ends a stretch
const LONG_STRETCH = 8_000; // characters after which the next item of a list begins a stretch

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

const BLANK = /\n[ \t]*\n/;
const CLOSED = /(?:<\/(?:script|pre|style|textarea)>|-->|\?>|\]\]>).*$/i; // the ends of blocks that blank lines do not end

/** Tags are text. A block that is never closed would take the rest of the answer: it is read as a paragraph. */
class Tags extends Tokenizer {
  html(rest) {
    const token = super.html(rest);
    const text = token?.raw.trim();
    return token && BLANK.test(text) && !CLOSED.test(text) ? undefined : token;
  }

  tag(rest) {
    const { inLink, inRawBlock } = this.lexer.state; // by a tag that is text nothing begins
    const token = super.tag(rest);
    Object.assign(this.lexer.state, { inLink, inRawBlock });
    return token;
  }
}

class Shown extends Renderer {
  html({ text, block }) {
    if (block) return `<p class="html">${escaped(text.trimEnd())}</p>`;
    if (this.inCell && /^<br ?\/?>$/i.test(text)) return "<br>"; // a cell has no other way to begin a line
    return escaped(text).replaceAll("\n", "<br>");
  }

  tablecell(token) {
    this.inCell = true;
    const made = super.tablecell(token);
    this.inCell = false;
    return made;
  }
}

/** A pair of tags that lowers, raises or names a key, as in H<sub>2</sub>O; a single one is a tag like any other. */
const PAIRS = {
  name: "pair",
  level: "inline",
  start: (rest) => rest.search(/<(?:sub|sup|kbd)>/),
  tokenizer(rest) {
    const [raw, tag, text] = /^<(sub|sup|kbd)>([^<\n]+)<\/\1>/.exec(rest) ?? [];
    return raw && { type: "pair", raw, tag, tokens: this.lexer.inlineTokens(text) };
  },
  renderer({ tag, tokens }) {
    return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
  },
};

const TEX = /^(?:\\\([^]{1,4000}?\\\)|\\\[[^]{1,4000}?\\\]|\$\$[^]{1,4000}?\$\$)/;

/** Mathematics in TeX, with its marks: those of Markdown mean something else in it. */
const FORMULAS = [
  {
    name: "formulas",
    level: "block",
    start: (rest) => rest.search(/(?<=\n) {0,3}(?:\\\[|\$\$)/),
    tokenizer(rest) {
      const [indent] = /^ {0,3}/.exec(rest);
      const [text] = TEX.exec(rest.slice(indent.length)) ?? [];
      const end = text && !text.startsWith("\\(") && /^[ \t]*(?:\n|$)/.exec(rest.slice(indent.length + text.length));
      return end ? { type: "formulas", raw: indent + text + end[0], text } : undefined;
    },
    renderer: ({ text }) => `<pre><code class="language-tex">${escaped(text)}\n</code></pre>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (rest) => rest.search(/\\[([]|\$\$/),
    tokenizer(rest) {
      const [raw] = TEX.exec(rest) ?? [];
      return raw && { type: "formula", raw };
    },
    renderer: ({ raw }) => `<code>${escaped(raw)}</code>`,
  },
];

const READING = {
  ...new Marked({ gfm: true, breaks: true, extensions: [PAIRS, ...FORMULAS] }).defaults,
  tokenizer: new Tags(),
  renderer: new Shown(),
};

class Reader extends Lexer {
  inlineTokens(text, tokens) {
    if (text.length > MOST_INLINE) throw new RangeError("the paragraph is too long");
    return super.inlineTokens(text, tokens);
  }
}

function toMarkup(text) {
  if (text.length > MOST_MARKDOWN || marksIn(text) > MOST_MARKS) throw new RangeError("the stretch is too long");
  return Parser.parse(new Reader(READING).lex(text), READING);
}

const ALLOWED = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: (
    "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i img input kbd li ol p pre s strong sub sup table tbody td " +
    "th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["align", "alt", "checked", "class", "disabled", "href", "src", "start", "title", "type"],
  ADD_URI_SAFE_ATTR: ["align", "checked", "disabled", "start", "type"], // no addresses, whatever they say
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|data:image\/(?:png|jpeg|gif|webp);base64,)/i,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.tagName === "IMG" && !/^data:image\//i.test(node.getAttribute("src") ?? "")) {
    const said = document.createElement("span");
    said.className = "absent-image";
    said.textContent = `[image: ${node.getAttribute("alt") || node.getAttribute("src") || "without a name"}]`;
    node.replaceWith(said);
  }
  if (node.tagName === "INPUT" && node.getAttribute("type") !== "checkbox") node.remove();
  if (node.hasAttribute?.("class") && !/^(?:html|language-[\w+#.-]+)$/.test(node.getAttribute("class"))) {
    node.removeAttribute("class");
  }
});

/** Markdown as nodes that are safe to show; null for a text that is too long for it, or nested too deeply. */
function toNodes(text) {
  let nodes;
  try {
    nodes = DOMPurify.sanitize(toMarkup(text), ALLOWED);
  } catch {
    return null;
  }
  for (const link of nodes.querySelectorAll("a:not([href])")) link.replaceWith(...link.childNodes); // it leads nowhere
  for (const block of nodes.children) block.dir = "auto"; // what stands within has its place by it, and its lines by their own
  for (const pre of nodes.querySelectorAll("pre")) frame(pre);
  for (const table of nodes.querySelectorAll("table")) {
    const around = document.createElement("div");
    around.className = "table-frame";
    around.tabIndex = 0;
    around.setAttribute("role", "region");
    around.setAttribute("aria-label", "Table");
    table.replaceWith(around);
    around.append(table);
  }
  for (const box of nodes.querySelectorAll("input")) box.setAttribute("aria-label", "Task");
  return nodes;
}

/** Put a block of code into a frame that names its language and copies it. */
function frame(pre) {
  const language = /language-(\S+)/.exec(pre.querySelector("code")?.className ?? "")?.[1] ?? "";
  const around = document.createElement("div");
  around.className = "code-frame";
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const name = document.createElement("span");
  name.textContent = language || "text";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "button small quiet";
  copy.textContent = "Copy";
  copy.dataset.copies = "";
  bar.append(name, copy);
  pre.replaceWith(around);
  pre.removeAttribute("dir");
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  around.append(bar, pre);
}

/** Copy a text; whether it worked. Where the page may not use the clipboard, by a selection. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "out-of-sight";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button[data-copies]");
  if (!button) return;
  const done = await copyText(button.closest(".code-frame").querySelector("pre").textContent);
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
});

/** The lines of a text: where each begins and ends, and whether a block of code goes on behind it. */
function* lines(text) {
  let fence = null;
  for (let at = 0, end; at < text.length; at = end + 1) {
    end = text.indexOf("\n", at);
    if (end < 0) end = text.length;
    const mark = /^ {0,3}(`{3,}|~{3,})/.exec(text.slice(at, Math.min(end, at + 200)))?.[1];
    if (mark && fence === null) fence = mark;
    else if (mark && mark[0] === fence[0] && mark.length >= fence.length) fence = null;
    yield { at, end, inCode: fence !== null };
  }
}

/** How many characters of a text are in no block of code. */
function marksIn(text) {
  let count = 0;
  for (const { at, end, inCode } of lines(text)) if (!inCode) count += end + 1 - at;
  return count;
}

/** A text cut where blocks end, so that only the last stretch of a growing text is read anew. */
export function stretches(text) {
  const found = [];
  let from = 0;
  for (const { at, end, inCode } of lines(text)) {
    if (inCode || end - from <= STRETCH) continue;
    const next = text.slice(end + 1, end + 12);
    const goesOn = /^(\s|[-*+>|]|\d+[.)])/.test(next); // a list, a quote or a table may go on behind a blank line
    const isBlank = !text.slice(at, Math.min(end, at + 200)).trim();
    // A list whose items are all numbered 1 would begin anew with each stretch.
    const isItem = end - from > LONG_STRETCH && /^([-*+]|(?!1\D)\d+[.)])\s/.test(next);
    if ((isBlank && next && !goesOn) || isItem) {
      found.push(text.slice(from, end));
      from = end + 1;
    }
  }
  found.push(text.slice(from));
  return found;
}

function Stretch({ text }) {
  const ref = useRef();
  useLayoutEffect(() => {
    const nodes = toNodes(text);
    ref.current.className = nodes ? "stretch" : "stretch plain";
    ref.current.replaceChildren(nodes ?? text);
  }, [text]);
  return html`<div ref=${ref}></div>`;
}

/** A text of a model. */
export function Markdown({ text }) {
  return html`<div class="prose">
    ${stretches(text).map((each, index) => html`<${Stretch} key=${index} text=${each} />`)}
  </div>`;
}

