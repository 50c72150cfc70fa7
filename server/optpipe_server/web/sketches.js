// All schedules of a problem, small, on one time scale: the shortest first, then those that need more memory.
import { button, element, fullest } from "/page/picture/panel.js";
import { raster } from "/page/picture/shapes.js";
import { ms, percent } from "/page/picture/words.js";
/** @import { Document } from "/page/picture/data.js" */

/** @typedef {{method: string, fits: boolean, wrong: string[], drawn: number | null, placement: any}} Row */

const HEIGHT = 62;
const WIDTH = 300;
const LONGEST = 1.5; // times the shortest: what is longer is cut off

/** @param {Row[]} rows @param {Document} found @param {string} chosen @param {(method: string) => void} choose */
export function sketches(rows, found, chosen, choose) {
  const drawn = rows.filter(({ drawn }) => drawn !== null);
  const times = drawn.map(({ drawn }) => found.schedules[/** @type {number} */ (drawn)].makespan_ms);
  const latest = Math.min(Math.max(...times, 1e-9), LONGEST * Math.min(...times));
  const made = element("div", { class: "sketches", role: "group", "aria-label": "Schedules" });
  const best = drawn.find(({ fits }) => fits);
  for (const row of drawn) made.append(sketch(row, found, latest, row === best, row.method === chosen, choose));
  return made;
}

/** @param {Row} row @param {Document} found @param {number} latest @param {boolean} best @param {boolean} chosen
 * @param {(method: string) => void} choose */
function sketch(row, found, latest, best, chosen, choose) {
  const schedule = found.schedules[/** @type {number} */ (row.drawn)];
  const dense = Math.min(2, window.devicePixelRatio || 1);
  const image = element("img", { src: raster(schedule, [0, latest], WIDTH * dense, HEIGHT * dense), alt: "" });
  const full = fullest(schedule);
  const stages = row.placement ? " · other stages" : "";
  const more = row.fits ? `bubble ${percent(schedule.bubble)}` : "does not fit";
  const made = button("", () => choose(row.method), `sketch ${row.fits ? "" : "over"} ${best ? "best" : ""}`);
  made.replaceChildren(
    element("span", "head", element("strong", "", row.method), element("b", "", ms(schedule.makespan_ms))),
    image,
    element("small", "", `${more} · ${percent(full)} of the memory${stages}${best ? " · shortest that fits" : ""}`),
  );
  made.dataset.focus = row.method;
  made.setAttribute("aria-pressed", String(chosen));
  return made;
}

/** The methods that have no schedule here, with the reasons.
 * @param {Row[]} rows */
export function missing(rows) {
  const none = rows.filter(({ drawn }) => drawn === null);
  if (!none.length) return [];
  const list = none.map(({ method, wrong }) => element("li", "", element("b", "", method), ` ${wrong[0]}`));
  const summary = element("summary", "", `${none.length} do not apply to these stages`);
  return [element("details", "", summary, element("ul", "missing", ...list))];
}
