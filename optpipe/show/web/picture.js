// The picture in a page: legend, chart, what is chosen, and below it where the time goes. It can be shown another
// document; the time, the device and what is chosen stay where the new one has them.
import { spanOf } from "./data.js";
import { draw, latestEnd } from "./draw.js";
import { onThemeChange } from "./layout.js";
import { aboutOp, button, deviceTable, element, fullest, legend, listOfWaits, shares, toggle, whyGap } from "./panel.js";
import { listen } from "./pointer.js";
/** @import { Document } from "./data.js" */
/** @import { Chosen, Marked, View } from "./draw.js" */
/** @import { Frame } from "./layout.js" */

/** @typedef {Awaited<ReturnType<typeof show>>} Shown */

const HINT =
  "Click a gap to see why the device waits there, or an op. Drag to zoom, double-click to see all. " +
  "Ctrl and the wheel zoom, Shift and the wheel move.";

/** Shows a document in an element.
 * @param {HTMLElement} place @param {Document} found */
export async function show(place, found) {
  let { schedules } = found;
  let latest = latestEnd(schedules);
  /** @type {View} */
  const view = { range: [0, latest], chosen: null, marked: null, critical: false, changes: true, device: fullestDevice(found) };
  const keys = "Gantt chart. Arrow keys go from op to op, plus and minus zoom, Escape clears.";
  const plot = element("div", { class: "plot", tabindex: 0, role: "application", "aria-label": keys });
  const details = element("aside", { tabindex: 0, "aria-live": "polite", "aria-label": "What is chosen" }); // it scrolls

  /** @type {Frame} */
  let frame;
  /** @type {Promise<void> | null} */
  let waiting = null;
  const redraw = () => {
    waiting ??= new Promise(requestAnimationFrame).then(async () => {
      waiting = null;
      if (plot.isConnected) frame = await draw(plot, schedules, view);
    });
    return waiting;
  };
  const choose = (/** @type {Chosen | null} */ chosen) => {
    view.chosen = chosen;
    if (chosen) {
      const { device, begin, end } = spanOf(schedules[chosen.schedule], chosen);
      const half = (view.range[1] - view.range[0]) / 2;
      view.device = device;
      if (end < view.range[0] || begin > view.range[1]) zoom([begin - half, begin + half]);
    }
    tell();
    redraw();
  };
  const zoom = (/** @type {[number, number] | null} */ range) => {
    const [from, to] = range ?? [0, latest];
    const width = Math.min(latest, Math.max(to - from, latest * 1e-7));
    const left = Math.max(0, Math.min(latest - width, from));
    view.range = [left, left + width];
    redraw();
  };
  const tell = () => {
    const { chosen } = view;
    const schedule = schedules[chosen?.schedule ?? schedules.length - 1];
    if (!chosen) details.replaceChildren(listOfWaits(schedule, choose), element("p", "hint", HINT));
    else {
      const told = chosen.gap >= 0 ? whyGap(schedule, chosen.gap, choose) : aboutOp(schedule, chosen.row, choose);
      details.replaceChildren(told, button("back", () => choose(null), "back"));
    }
  };
  const mark = (/** @type {Marked | null} */ marked) => {
    view.marked = marked;
    redraw();
  };
  const showDevice = (/** @type {number} */ device) => {
    view.device = device;
    mark(schedules[0].memory ? null : { device });
  };
  const critical = toggle("Critical path", view.critical, (on) => ((view.critical = on), redraw()));
  const changes = toggle("Changes", view.changes, (on) => ((view.changes = on), redraw()));
  const tools = element("div", "tools", critical, changes, button("Show all", () => zoom(null)));
  const above = element("div", "over-plot");
  const below = element("div", "below");
  const around = () => {
    const several = schedules.length > 1;
    changes.hidden = !schedules.some(({ ops }) => ops.changed);
    above.replaceChildren(legend(found), tools);
    below.replaceChildren(
      ...schedules.map((schedule) => shares(found, schedule, several)),
      deviceTable(found, showDevice),
    );
    tell();
  };
  around();
  place.replaceChildren(above, element("div", "drawing", plot, details), below);
  frame = await draw(plot, schedules, view);
  const listening = new AbortController();
  const chosen = () => view.chosen;
  const picture = { schedules: () => schedules, frame: () => frame, range: () => view.range, chosen, choose, zoom };
  const placeOf = listen(plot, picture, listening.signal);
  // @ts-ignore plotly adds `on` to what it draws in
  plot.on("plotly_relayout", (/** @type {Record<string, number>} */ changed) => {
    const [from, to] = [changed["xaxis.range[0]"], changed["xaxis.range[1]"]];
    if (from !== undefined && to !== undefined) zoom([from, to]);
  });
  onThemeChange(redraw, listening.signal);
  const resized = new ResizeObserver(redraw);
  resized.observe(plot);
  return {
    plot,
    placeOf,
    choose,
    mark,
    chosen,
    async update(/** @type {Document} */ next) {
      const [from, to] = view.range;
      const all = from === 0 && to === latest;
      const sameDevices = next.schedules[0].devices.length === schedules[0].devices.length;
      found = next;
      schedules = next.schedules;
      latest = latestEnd(schedules);
      view.range = all || from >= latest ? [0, latest] : [from, Math.min(to, latest)];
      view.chosen = view.marked = null;
      if (!sameDevices) view.device = fullestDevice(found);
      around();
      await redraw();
    },
    close() {
      listening.abort();
      resized.disconnect();
      place.replaceChildren();
    },
  };
}

/** The device with the largest share of its memory in use.
 * @param {Document} found */
function fullestDevice({ schedules }) {
  const last = schedules[schedules.length - 1];
  return last.devices.findIndex(({ peak, limit }) => peak / Math.max(1, limit) === fullest(last));
}
