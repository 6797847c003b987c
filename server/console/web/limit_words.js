// Limits in words: those of a key or an owner, as the API has them by their names.

import { number, size } from "./elements.js";

const PERIODS = { second: 1, minute: 60, day: 86_400 }; // seconds
const OTHERS = {
  concurrent_requests: (value) => `${number(value)} requests at once`,
  concurrent_streams: (value) => `${number(value)} streams at once`,
  queued_responses: (value) => `${number(value)} responses queued`,
  stored_bytes: (value) => `${size(value)} stored`,
  total_tokens: (value) => `${number(value)} tokens in all`,
  total_cost: (value) => `costs of ${value} in all`,
};

function words(name, value) {
  if (OTHERS[name]) return OTHERS[name](value);
  const [, unit, period] = /^(.+)_per_(\w+)$/.exec(name) ?? [];
  if (unit) return `${number(value)} ${unit.replaceAll("_", " ")} a ${period}`;
  return `${name.replaceAll("_", " ")} ${Array.isArray(value) ? value.join(", ") : value}`;
}

/** What limits say, one text each, those of single models with the model's name. */
export function limitWords({ models = {}, ...limits } = {}) {
  const own = Object.entries(limits).map(([name, value]) => words(name, value));
  const of = Object.entries(models).flatMap(([model, each]) => limitWords(each).map((said) => `${said} of ${model}`));
  return [...own, ...of];
}

/** The period of a rate, of so many seconds. */
export function periodWords(seconds) {
  const name = Object.keys(PERIODS).find((period) => PERIODS[period] === seconds);
  return name ? `a ${name}` : `each ${number(seconds)} s`;
}
