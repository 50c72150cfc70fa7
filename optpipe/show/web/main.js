// @ts-check
// The page: reads its document, and draws the picture with the text around it.
import { read } from "./data.js";
import { draw, latestEnd } from "./draw.js";
import {
  aboutOp,
  button,
  deviceTable,
  element,
  heading,
  legend,
  listOfWaits,
  shares,
  toggle,
  whyGap,
} from "./panel.js";
import { listen } from "./pointer.js";
import { onThemeChange } from "./theme.js";

/**
 * @typedef {import("./data.js").Document} Document
 * @typedef {import("./draw.js").Chosen} Chosen
 * @typedef {import("./draw.js").View} View
 */

/** Shows a document in an element.
 * @param {HTMLElement} place
 * @param {Document} found */
export async function show(place, found) {
  const { schedules } = found;
  const after = schedules[schedules.length - 1];
  const latest = latestEnd(schedules);
  const share = after.devices.map(({ peak, limit }) => peak / Math.max(1, limit));
  /** @type {View} */
  const view = {
    range: [0, latest],
    chosen: null,
    critical: false,
    changes: true,
    device: share.indexOf(Math.max(...share)),
  };
  const plot = element("div", "plot");
  plot.tabIndex = 0;
  plot.setAttribute("role", "application");
  plot.setAttribute("aria-label", "Gantt chart. Arrow keys go from op to op, plus and minus zoom, Escape clears.");
  const details = element("aside", "");
  details.setAttribute("aria-live", "polite");

  /** @type {import("./layout.js").Frame} */
  let frame;
  let waiting = false;
  const redraw = async () => {
    if (waiting) return;
    waiting = true;
    await new Promise(requestAnimationFrame);
    waiting = false;
    frame = await draw(plot, schedules, view);
  };
  const choose = (/** @type {Chosen | null} */ chosen) => {
    view.chosen = chosen;
    if (chosen) {
      const { ops, gaps } = schedules[chosen.schedule];
      view.device = chosen.gap >= 0 ? gaps.device[chosen.gap] : ops.device[chosen.row];
      const [begin, end] =
        chosen.gap >= 0
          ? [gaps.begin[chosen.gap], gaps.end[chosen.gap]]
          : [ops.start[chosen.row], ops.end[chosen.row]];
      if (end < view.range[0] || begin > view.range[1])
        zoom([begin - (view.range[1] - view.range[0]) / 2, begin + (view.range[1] - view.range[0]) / 2]);
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
    if (!chosen) {
      const hint =
        "Click a gap to see why the device waits there, or an op. Drag to zoom, double-click to see all. " +
        "Ctrl and the wheel zoom, Shift and the wheel move.";
      details.replaceChildren(listOfWaits(after, choose), element("p", "hint", hint));
      return;
    }
    const schedule = schedules[chosen.schedule];
    const told = chosen.gap >= 0 ? whyGap(schedule, chosen.gap, choose) : aboutOp(schedule, chosen.row, choose);
    details.replaceChildren(
      told,
      button("back", () => choose(null), "back"),
    );
  };

  const tools = element(
    "div",
    "tools",
    toggle("Critical path", view.critical, (on) => {
      view.critical = on;
      redraw();
    }),
  );
  if (schedules.length > 1) {
    tools.append(
      toggle("Changes", view.changes, (on) => {
        view.changes = on;
        redraw();
      }),
    );
  }
  tools.append(button("Show all", () => zoom(null)));
  const table = deviceTable(found, (device) => {
    view.device = device;
    redraw();
  });
  const below = element(
    "div",
    "below",
    ...schedules.map((schedule) => shares(found, schedule, schedules.length > 1)),
    table,
  );
  place.replaceChildren(
    heading(found),
    element("div", "over-plot", legend(found), tools),
    element("main", "", plot, details),
    below,
  );
  tell();
  frame = await draw(plot, schedules, view);
  listen(plot, schedules, { frame: () => frame, range: () => view.range, chosen: () => view.chosen, choose, zoom });
  // @ts-ignore plotly adds `on` to what it draws in
  plot.on("plotly_relayout", (/** @type {Record<string, number>} */ changed) => {
    const [from, to] = [changed["xaxis.range[0]"], changed["xaxis.range[1]"]];
    if (from !== undefined && to !== undefined) zoom([from, to]);
  });
  onThemeChange(redraw);
  new ResizeObserver(redraw).observe(plot);
}

const source = document.getElementById("document");
const place = document.getElementById("picture");
if (source?.textContent && place) {
  await show(place, read(source.textContent));
  place.dataset.drawn = "true";
}
