// What pages share: hooks for watched values, polling and the address, and notices.

import { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/standalone.module.js";
import { connection, watched } from "./api.js";

/** The value of something watched, in a component. */
export function useWatched(source) {
  const [value, set] = useState(source.get());
  useEffect(() => {
    set(() => source.get());
    return source.watch((next) => set(() => next));
  }, [source]);
  return value;
}

// --- the address: #/page/id?filters

const ID = /^\w[\w-]*$/; // of everything that a page shows: what is none could lead elsewhere in a path of the API

const read = () => {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [page = "chat", ...rest] = path.split("/").filter(Boolean);
  const id = rest.join("/") || null;
  return { page: id && !ID.test(id) ? null : page, id, query: new URLSearchParams(query) };
};

export const route = watched(read());
window.addEventListener("hashchange", () => route.set(read()));

export const href = (page, id, query) => {
  const text = new URLSearchParams(query ?? {}).toString();
  return `#/${page}${id ? `/${id}` : ""}${text ? `?${text}` : ""}`;
};
/** Show a page: at once, and not with the event of its address only, so that what is typed meanwhile finds its box. */
export const go = (...args) => {
  location.hash = href(...args);
  route.set(read());
};
/** Change the address without a step in the history. */
export const replace = (...args) => {
  history.replaceState(null, "", href(...args));
  route.set(read());
};

// --- what a page loads

/** What `load` resolves to: {value, error, loading, reload}; `reload()` tells whether it has worked. every: milliseconds
 * between two loads while the page is seen, of which one is left out while another load is under way; 0 loads once.
 * Such a load is given the value that is shown, every other one null. What was loaded stays while it is loaded again;
 * what failed is, once the server can be reached again. */
export function useLoaded(load, inputs, every = 0) {
  const [state, set] = useState({ value: null, error: null, loading: true });
  const underWay = useRef(null);
  const shown = useRef(null);
  shown.current = state.value;
  const again = useCallback(async (before = null) => {
    const mine = (underWay.current = {});
    const isLatest = () => underWay.current === mine;
    try {
      const value = await load(before);
      if (!isLatest()) return false;
      set({ value, error: null, loading: false });
      return true;
    } catch (error) {
      if (isLatest()) set((now) => ({ value: now.value, error, loading: false }));
      return false;
    } finally {
      if (isLatest()) underWay.current = null;
    }
  }, inputs);
  useEffect(() => {
    set({ value: null, error: null, loading: true });
    again();
    return () => {
      underWay.current = null;
    };
  }, [again]);
  const failed = Boolean(state.error);
  useEffect(() => {
    if (!failed) return undefined;
    return connection.watch((now) => now === "online" && again());
  }, [again, failed]);
  useEffect(() => {
    if (!every) return undefined;
    const due = () => document.visibilityState === "visible" && connection.get() === "online" && !underWay.current;
    const timer = setInterval(() => due() && again(shown.current), every);
    const back = () => due() && again();
    document.addEventListener("visibilitychange", back);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", back);
    };
  }, [again, every]);
  return { ...state, reload: () => again() };
}

/** A list of which the first rows are loaded, as by `useLoaded`, with `more()`, which has `page` rows more loaded. load:
 * takes how many rows are wanted, and what `useLoaded` gives it; resolves to an object with the rows as `data`, and
 * `has_more`. */
export function useList(load, inputs, every = 0, page = 100) {
  const wanted = useMemo(() => ({ rows: page }), inputs);
  const loaded = useLoaded((before) => load(wanted.rows, before), inputs, every);
  const more = () => {
    wanted.rows += page;
    return loaded.reload();
  };
  return { ...loaded, more };
}

/** A function that has the component drawn again, once a frame at most. */
export function useRedraw() {
  const [, set] = useState(0);
  const asked = useRef(0);
  useEffect(() => () => cancelAnimationFrame(asked.current), []);
  return useCallback(() => {
    if (asked.current) return;
    asked.current = requestAnimationFrame(() => {
      asked.current = 0;
      set((count) => count + 1);
    });
  }, []);
}

/** The dialog of the frame that is open, by its name, or null. */
export const dialog = watched(null);

// --- notices

export const notices = watched([]);
let count = 0;

const place = () => location.hash.split("?")[0];

/** Say something for some seconds, to screen readers as well, on this page alone. kind: "info", or "error". */
export function notify(text, kind = "info") {
  const notice = { id: ++count, text, kind, place: place() };
  notices.set([...notices.get().slice(-3), notice]);
  setTimeout(() => dismiss(notice.id), kind === "error" ? 9000 : 3500);
}

route.watch(() => notices.set(notices.get().filter((notice) => notice.place === place())));

export const dismiss = (id) => notices.set(notices.get().filter((notice) => notice.id !== id));

/** Do something, and say so if it fails; whether it worked. of: what it is done with, where it is one of several. */
export async function attempt(doing, done, of) {
  try {
    await doing();
    if (done) notify(done);
    return true;
  } catch (error) {
    notify(of ? `${of}: ${error.message}` : error.message, "error");
    return false;
  }
}

/** `attempt`, one at a time, however often somebody presses: it, and whether one is under way. */
export function useAttempt() {
  const busy = useRef(false);
  const [working, setWorking] = useState(false);
  const once = async (...attempted) => {
    if (busy.current) return false;
    setWorking((busy.current = true));
    const done = await attempt(...attempted);
    setWorking((busy.current = false));
    return done;
  };
  return [once, working];
}

/** A watched value that this browser remembers for this tab. */
export function kept(name, initial) {
  const place = `antiphon.${name}`;
  let value = initial;
  try {
    value = JSON.parse(sessionStorage.getItem(place)) ?? initial;
  } catch {
    // Nothing that can be read is kept.
  }
  const made = watched(value);
  made.watch((next) => {
    try {
      sessionStorage.setItem(place, JSON.stringify(next));
    } catch {
      // It is larger than the browser keeps, and lasts as long as this page.
    }
  });
  return made;
}

/** The value of something watched, and a function that sets it: to a value, or to what a function makes of it. */
export function useChanged(source) {
  const change = useCallback((next) => source.set(typeof next === "function" ? next(source.get()) : next), [source]);
  return [useWatched(source), change];
}
