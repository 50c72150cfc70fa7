// A pipeline by sliders, without a job: what all published schedules make of it, side by side; one of them large, and
// edited op by op. The address says all of it, so it can be shared.
import { joined, pick, read } from "/page/picture/data.js";
import { button, card, download, element, fullest, toggle } from "/page/picture/panel.js";
import { show } from "/page/picture/picture.js";
import { raster } from "/page/picture/shapes.js";
import { onThemeChange } from "/page/picture/layout.js";
import { ms, opName, percent, programsOf } from "/page/picture/words.js";
import { follow, getFigure, pause, post } from "./api.js";
import { after, edit, verdictOn } from "./edit.js";
import { choice, fault, field, fill, link, notice, onlyLast, refill, title, trying } from "./parts.js";
import { problemOf, sliderCard, SLIDERS, valuesOf } from "./sliders.js";
/** @import { Move } from "./edit.js" */
/** @import { Document, Schedule } from "/page/picture/data.js" */
/** @import { Shown } from "/page/picture/picture.js" */

/** @typedef {{method: string, fits: boolean, wrong: string[], drawn: number | null, placement: any}} Row */

const [WIDTH, HEIGHT] = [300, 62]; // of a sketch
const LONGEST = 1.5; // times the shortest: what is longer is cut off in a sketch
const AFTER_MS = 120; // without another movement of a slider
const HELD_MS = 60; // of an op that is held
const SEARCH_S = 10;
const SEARCHED = "the search";
const MOST_FORWARDS = 512; // stages times micro-batches

/** @param {HTMLElement} place @param {AbortSignal} signal @param {URLSearchParams} query */
export async function showWorkbench(place, signal, query) {
  const values = valuesOf(query);
  let own = query.get("stages") !== "given"; // whether each schedule has the stages that it is for
  let method = query.get("method") ?? "";
  /** @type {Move[]} */
  let moves = (query.get("moves") ?? "")
    .split("_")
    .filter((text) => /^\d+\.\d+\.\d+$/.test(text))
    .map((text) => text.split(".").map(Number))
    .map(([device, from, to]) => ({ device, from, to }));
  let editing = moves.length > 0;

  /** @type {{rows: Row[], found: Document | null}} what the service replied, and the same with what a search has found */
  let replied = { rows: [], found: null };
  let all = replied;
  /** @type {Shown | null} */
  let shown = null;
  /** @type {{schedule: Schedule, programs: string[][], made: number, listening: AbortController} | null} */
  let edited = null;

  const overview = element("div", { class: "overview", "aria-live": "off" });
  const told = element("div", { role: "status" });
  const failed = element("div", "");
  const verdict = element("div", { class: "verdict", "aria-live": "assertive" });
  const drawing = element("div", "drawing-place");
  const beside = choice([["", "nothing"]], query.get("beside") ?? "", () => drawLarge());
  const which = choice([["", ""]], "", (value) => choose(value));
  const editSwitch = toggle("Edit", editing, (on) => {
    editing = on;
    if (!on) moves = [];
    drawLarge();
  });
  const undo = button("Undo", () => (moves.pop(), startEdit()));
  const search = button(`Search ${SEARCH_S} s`, () => trying(failed, startSearch), "primary");
  const controls = element("div", "controls", field("Schedule", which), field("beside", beside));
  const save = () => download(`${problemOf(values).name}.json`, JSON.stringify(problemOf(values), null, 1));
  const actions = element("div", "actions", editSwitch, undo, button("Save problem", save));
  const large = card("Schedule", controls, actions, verdict, drawing);
  large.classList.add("wide");
  const schedules = card("All schedules", told, overview);
  schedules.classList.add("wide");
  place.replaceChildren(
    title("Workbench", element("div", "actions", search)),
    failed,
    element("div", "bench", sliderCard(values, own, changed), element("div", "stacked", schedules, large)),
  );
  signal.addEventListener("abort", () => {
    edited?.listening.abort();
    shown?.close();
  });
  onThemeChange(() => fillOverview(), signal);

  function address() {
    const said = new URLSearchParams();
    for (const { key, value } of SLIDERS) if (values[key] !== value) said.set(key, String(values[key]));
    if (!own) said.set("stages", "given");
    if (method && method !== SEARCHED) said.set("method", method);
    if (beside.value && beside.value !== SEARCHED) said.set("beside", beside.value);
    if (moves.length) said.set("moves", moves.map(({ device, from, to }) => `${device}.${from}.${to}`).join("_"));
    const text = said.toString();
    return `#/workbench${text ? `?${text}` : ""}`;
  }

  const asking = onlyLast(signal);
  /** The problem is another one, or which stages a schedule has.
   * @param {boolean} now whether each schedule has the stages that it is for */
  function changed(now) {
    own = now;
    moves = [];
    editing = false;
    editSwitch.setAttribute("aria-pressed", "false");
    asking.soon(refresh, AFTER_MS);
  }

  async function refresh() {
    const current = asking.next();
    history.replaceState(null, "", address());
    place.classList.add("pending");
    large.hidden = values.p * values.v * values.m > MOST_FORWARDS;
    if (large.hidden) {
      overview.replaceChildren();
      told.replaceChildren(
        notice("plain", `${values.p * values.v} stages and ${values.m} micro-batches: up to ${MOST_FORWARDS} forwards are drawn here. A job may have more.`),
      );
      return;
    }
    try {
      const body = { problem: problemOf(values), placements: own ? "all" : "keep" };
      const reply = await post("/v1/workbench", body, current);
      all = replied = { rows: reply.rows, found: reply.figure && read(JSON.stringify(reply.figure)) };
      told.replaceChildren();
    } catch (error) {
      if (current.aborted) return;
      told.replaceChildren(fault(error));
      if (!place.dataset.drawn) throw error;
      await pause(1000, current);
      if (!current.aborted) refresh(); // a service that was away comes back
      return;
    }
    place.classList.remove("pending");
    fillOverview();
    await drawLarge();
    place.dataset.drawn = String(Number(place.dataset.drawn ?? 0) + 1);
  }

  /** The row of the chosen method, with the document of all rows; null where it is not drawn. */
  function chosenRow() {
    const { rows, found } = all;
    const row = rows.find((each) => each.method === method);
    return found && row && row.drawn !== null ? { rows, found, row, drawn: row.drawn } : null;
  }

  function fillOverview() {
    const { rows, found } = all;
    if (!found) {
      overview.replaceChildren(...missing(rows));
      return;
    }
    const drawn = rows.filter((row) => row.drawn !== null);
    if (!drawn.some((row) => row.method === method)) method = drawn[0].method;
    const names = drawn.map((row) => /** @type {[string, string]} */ ([row.method, row.fits ? row.method : `${row.method} (does not fit)`]));
    const kept = drawn.some((row) => row.method === beside.value) ? beside.value : (query.get("beside") ?? "");
    query.delete("beside");
    fill(which, names, method);
    fill(beside, [["", "nothing"], ...names], names.some(([name]) => name === kept) ? kept : "");
    const scrolled = overview.querySelector(".sketches")?.scrollTop ?? 0;
    const list = sketches(rows, found, method, choose);
    refill(overview, list, ...missing(rows));
    list.scrollTop = scrolled;
  }

  /** @param {string} chosen */
  function choose(chosen) {
    method = chosen;
    moves = [];
    which.value = chosen;
    for (const each of overview.querySelectorAll(".sketch"))
      each.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (each).dataset.focus === chosen));
    drawLarge();
  }

  async function drawLarge() {
    const now = chosenRow();
    edited?.listening.abort();
    edited = null;
    undo.hidden = true;
    beside.disabled = editing;
    place.classList.toggle("editing", editing);
    history.replaceState(null, "", address());
    if (!now) return;
    const { row } = now;
    const other = editing ? undefined : now.rows.find((each) => each.method === beside.value && each.method !== method);
    verdict.replaceChildren(...(row.fits ? [] : [notice("wrong", row.wrong[0])]));
    const one = pick(now.found, [...(other && other.drawn !== null ? [other.drawn] : []), now.drawn]);
    if (shown) await shown.update(one);
    else shown = await show(drawing, one);
    place.dataset.method = method;
    if (editing) await startEdit();
  }

  /** Begins with the schedule as it is made, and does the moves. */
  async function startEdit() {
    const now = chosenRow();
    if (!now || !shown) return;
    edited?.listening.abort();
    const schedule = pick(now.found, [now.drawn]).schedules[0];
    const base = programsOf(schedule);
    const fine = moves.every(({ device, from, to }) => base[device] && Math.max(from, to) < base[device].length);
    if (!fine) moves = [];
    const listening = new AbortController();
    const current = { schedule, programs: moves.reduce(after, base), made: schedule.makespan_ms, listening };
    edited = current;
    const on = {
      schedule: () => current.schedule,
      programs: () => current.programs,
      hold: (/** @type {Move} */ move) => check(after(current.programs, move), false),
      drop: (/** @type {Move} */ move, /** @type {string} */ name) => {
        current.programs = after(current.programs, move);
        moves.push(move);
        check(current.programs, true, name);
      },
      cancel: () => check(current.programs, false),
    };
    edit(shown, on, listening.signal);
    undo.hidden = false;
    await check(current.programs, true);
  }

  const checking = onlyLast();
  /** Tells what is wrong with programs; draws them if they are to stay.
   * @param {string[][]} programs @param {boolean} stay @param {string} [name] the op that was moved */
  async function check(programs, stay, name) {
    const own = checking.next();
    const current = edited;
    const now = chosenRow();
    if (!current || !now || !shown) return;
    undo.disabled = !moves.length;
    if (stay) history.replaceState(null, "", address());
    else await pause(HELD_MS, own);
    if (own.aborted) return;
    const problem = problemOf(values);
    const schedule = {
      problem,
      devices: programs.map((program) => ({ program })),
      method: `${method}, edited`.slice(0, 200),
      ...(now.row.placement ? { placement: now.row.placement } : {}),
    };
    try {
      const reply = await post("/v1/workbench", { problem, schedule }, own);
      if (own.aborted || edited !== current) return;
      verdict.replaceChildren(verdictOn(reply, current.made, stay && !moves.length));
      if (stay && reply.figure) {
        const found = read(JSON.stringify(reply.figure));
        current.schedule = found.schedules[0];
        await shown.update(found);
        if (name) {
          const { ops } = current.schedule;
          const again = Array.from(ops.kind.keys()).find((each) => opName(current.schedule, each) === name);
          if (again !== undefined) shown.choose({ schedule: 0, gap: -1, row: again });
        }
      }
      place.dataset.edits = String(moves.length);
    } catch (error) {
      if (!own.aborted) verdict.replaceChildren(fault(error));
    }
  }

  /** A search is a job; what it finds stands beside the others as it comes. */
  async function startSearch() {
    const body = { problem: problemOf(values), time_limit_s: SEARCH_S, placements: own ? "all" : "keep" };
    const problem = JSON.stringify(body.problem);
    search.disabled = true;
    search.textContent = "Searching";
    const stop = new AbortController();
    signal.addEventListener("abort", () => stop.abort());
    let drawn = 0;
    try {
      const { url, id } = await post("/v1/jobs", body, signal);
      await follow(url, stop.signal, async (job) => {
        const over = job.state !== "queued" && job.state !== "running";
        if (over || JSON.stringify(problemOf(values)) !== problem) stop.abort();
        if (!job.best || job.best.seq === drawn || JSON.stringify(problemOf(values)) !== problem) return;
        drawn = job.best.seq;
        const figure = await getFigure(`${url}/figure?seq=${drawn}`, signal);
        const placement = job.best.schedule.placement ?? null;
        const row = { method: SEARCHED, fits: true, wrong: [], drawn: replied.found?.schedules.length ?? 0, placement };
        all = { rows: [row, ...replied.rows], found: replied.found ? joined(replied.found, figure) : figure };
        const gap = job.gap === null ? "" : job.gap ? `, at most ${percent(job.gap)} from the shortest there is` : ", proven";
        const said = notice("good", `The search has found ${ms(job.best.makespan_ms)}${gap}: `);
        said.append(link(`#/jobs/${id}`, "its job"));
        told.replaceChildren(said);
        fillOverview();
        if (method === SEARCHED) drawLarge();
      });
    } finally {
      search.disabled = false;
      search.textContent = `Search ${SEARCH_S} s`;
    }
  }

  await refresh();
}

/** @param {Row[]} rows @param {Document} found @param {string} chosen @param {(method: string) => void} choose */
function sketches(rows, found, chosen, choose) {
  const drawn = rows.filter(({ drawn }) => drawn !== null);
  const times = drawn.map(({ drawn }) => found.schedules[/** @type {number} */ (drawn)].makespan_ms);
  const latest = Math.min(Math.max(...times, 1e-9), LONGEST * Math.min(...times));
  const made = element("div", { class: "sketches", role: "group", "aria-label": "Schedules" });
  const shortest = drawn.find(({ fits }) => fits);
  for (const row of drawn) {
    const schedule = found.schedules[/** @type {number} */ (row.drawn)];
    const best = row === shortest;
    const dense = Math.min(2, window.devicePixelRatio || 1);
    const image = element("img", { src: raster(schedule, [0, latest], WIDTH * dense, HEIGHT * dense), alt: "" });
    const stages = row.placement ? " · other stages" : "";
    const more = `${row.fits ? `bubble ${percent(schedule.bubble)}` : "does not fit"} · ${percent(fullest(schedule))} of the memory`;
    const each = button("", () => choose(row.method), `sketch ${row.fits ? "" : "over"} ${best ? "best" : ""}`);
    each.replaceChildren(
      element("span", "head", element("strong", "", row.method), element("b", "", ms(schedule.makespan_ms))),
      image,
      element("small", "", `${more}${stages}${best ? " · shortest that fits" : ""}`),
    );
    each.dataset.focus = row.method;
    each.setAttribute("aria-pressed", String(row.method === chosen));
    made.append(each);
  }
  return made;
}

/** The methods that have no schedule here, with the reasons.
 * @param {Row[]} rows */
function missing(rows) {
  const none = rows.filter(({ drawn }) => drawn === null);
  if (!none.length) return [];
  const list = none.map(({ method, wrong }) => element("li", "", element("b", "", method), ` ${wrong[0]}`));
  const summary = element("summary", "", `${none.length} do not apply to these stages`);
  return [element("details", "", summary, element("ul", "missing", ...list))];
}
