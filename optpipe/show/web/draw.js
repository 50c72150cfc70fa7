// Draws the picture with plotly, and again whenever the zoom, the choice or the window changes.
import { chainOf } from "./data.js";
import { frameOf, memoryOf, plotlyLayout, theme } from "./layout.js";
import { MOST_DRAWN, around, boxOf, labels, memorySteps, pathThrough, raster, visibleGaps, visibleRows } from "./shapes.js";
import { bytes, ms, percent, waitOf } from "./words.js";
/** @import { Schedule } from "./data.js" */
/** @import { Frame, Theme } from "./layout.js" */
/** @import { Box } from "./shapes.js" */

/**
 * @typedef {{schedule: number, gap: number, row: number}} Chosen a gap, or an op where `gap` is -1
 * @typedef {Partial<Record<"device" | "stage" | "microbatch", number | null>>} Marked the ops that have all of it
 * @typedef {{range: [number, number], chosen: Chosen | null, marked: Marked | null, critical: boolean, changes: boolean,
 *   device: number}} View
 */

const CLEAR = "rgba(0,0,0,0)";
const CONFIG = { displaylogo: false, doubleClick: false, showTips: false, displayModeBar: false };

/** The latest end of all schedules.
 * @param {Schedule[]} schedules */
export function latestEnd(schedules) {
  return Math.max(...schedules.map((schedule) => schedule.makespan_ms)) || 1;
}

/** Draws everything; resolves to where it lies.
 * @param {HTMLElement} element @param {Schedule[]} schedules @param {View} view @returns {Promise<Frame>} */
export async function draw(element, schedules, view) {
  const frame = frameOf(schedules, Math.max(280, element.clientWidth));
  const colours = theme();
  const visible = schedules.map((schedule) => visibleRows(schedule, view.range));
  const fine = visible.map((rows) => rows.length * schedules.length <= MOST_DRAWN);
  const grid = fine.every(Boolean); // plotly draws it over images
  const layout = plotlyLayout(schedules, frame, view.range, latestEnd(schedules), view.device, colours, grid);
  /** @type {{traces: object[], written: object[], images: object[], notes: object[]}} */
  const { traces, written, images, notes } = { traces: [], written: [], images: [], notes: [] }; // written: above lines
  schedules.forEach((schedule, i) => {
    const axis = `y${i + 2}`;
    const panel = frame.panels[i];
    const pixels = frame.right - frame.left;
    const rows = visible[i];
    const gaps = visibleGaps(schedule, view.range);
    traces.push(...gapTraces(schedule, gaps.length <= MOST_DRAWN ? gaps : [], axis, colours));
    if (fine[i]) {
      const scale = pixels / (view.range[1] - view.range[0]);
      const length = rows.reduce((sum, row) => sum + schedule.ops.end[row] - schedule.ops.start[row], 0) / rows.length;
      const between = { color: colours.ground, width: Math.min(0.8, 0.1 * scale * length) }; // thin where ops are
      schedule.colours.forEach(({ fill }, colour) => {
        const boxes = rows.filter((row) => schedule.ops.colour[row] === colour).map((row) => boxOf(schedule, row));
        if (boxes.length) traces.push(filled(boxes, axis, fill, between, `ops ${i} ${fill}`));
      });
      const { x, y, text, colour, size } = labels(schedule, rows, view.range, scale, panel.height / panel.devices);
      const textfont = { color: colour, size };
      written.push({ type: "scatter", mode: "text", x, y, yaxis: axis, text, textfont, hoverinfo: "skip", cliponaxis: true });
    } else {
      const dense = Math.min(2, window.devicePixelRatio || 1);
      const size = [Math.round(pixels * dense), Math.round(panel.height * dense)];
      const place = { xref: "x", yref: axis, x: view.range[0], y: 0, xanchor: "left", yanchor: "top", layer: "below" };
      const stretched = { sizex: view.range[1] - view.range[0], sizey: panel.devices, sizing: "stretch" };
      images.push({ source: raster(schedule, view.range, size[0], size[1]), ...place, ...stretched });
    }
    const changed = view.changes ? rows.filter((row) => schedule.ops.changed?.[row]) : [];
    if (changed.length <= MOST_DRAWN) traces.push(...changeTraces(schedule, changed, axis, colours));
    traces.push(...markedTraces(schedule, rows, view.marked, axis, colours));
    if (view.critical)
      traces.push(...through(schedule, Array.from(schedule.critical_path), axis, colours.ink, colours));
    if (view.chosen?.schedule === i) traces.push(...chosenTraces(schedule, view.chosen, axis, colours));
    const role = schedules.length > 1 && schedule.ops.changed ? (schedule.index ? "After" : "Before") : "";
    const name = [role, schedule.method].filter(Boolean).join(": ") || "schedule";
    const headline = `${name} · ${ms(schedule.makespan_ms)}${frame.narrow ? "" : ` · bubble ${percent(schedule.bubble)}`}`;
    notes.push(note(headline, panel.top, frame, colours));
  });
  if (frame.memory.height) {
    traces.push(...memoryTraces(schedules, view, colours));
    notes.push(memoryNote(schedules, view, frame, colours));
  }
  traces.push(...written);
  Object.assign(layout, { images, annotations: notes });
  await Plotly.react(element, traces, layout, CONFIG);
  return frame;
}

/** @param {{x: (number | null)[], y: (number | null)[]}} path @param {string} yaxis @param {object} line */
function lines({ x, y }, yaxis, line) {
  return { type: "scatter", mode: "lines", x, y, yaxis, hoverinfo: "skip", line };
}

/** @param {Box[]} boxes @param {string} yaxis @param {string} fill @param {object} line @param {string} name
 * @param {object} [pattern] */
function filled(boxes, yaxis, fill, line, name, pattern) {
  const filling = { fill: "toself", fillcolor: fill, ...(pattern ? { fillpattern: pattern } : {}) };
  return { ...lines(around(boxes), yaxis, { simplify: false, ...line }), ...filling, name };
}

/** @param {Schedule} schedule @param {number[]} gaps @param {string} axis @param {Theme} colours */
function gapTraces(schedule, gaps, axis, colours) {
  const hatched = { shape: "/", size: 6, solidity: 0.16, fgcolor: colours.hatch, bgcolor: colours.wait };
  return ["start", "end", "device", "transfer"].map((wait) => {
    const boxes = gaps.filter((gap) => waitOf(schedule, gap) === wait).map((gap) => boxOf(schedule, -1, gap));
    const colour = wait === "start" || wait === "end" ? colours.idle : colours.wait;
    return filled(boxes, axis, colour, { width: 0 }, wait, wait === "transfer" ? hatched : undefined);
  });
}

/** A bar along the top of each op that moved, and of another colour of each that only this schedule has.
 * @param {Schedule} schedule @param {number[]} rows @param {string} axis @param {Theme} colours */
function changeTraces(schedule, rows, axis, colours) {
  const { changed } = schedule.ops;
  if (!changed) return [];
  const bar = (/** @type {number} */ row) => {
    const [x0, x1, y0, y1] = boxOf(schedule, row);
    return /** @type {Box} */ ([x0, x1, y0, y0 - 0.18 * (y0 - y1)]);
  };
  const moved = rows.filter((row) => changed[row] === 1);
  const only = rows.filter((row) => changed[row] > 1);
  return [
    filled(moved.map(bar), axis, colours.ink, { width: 0 }, "moved"),
    filled(only.map(bar), axis, colours.accent, { width: 0 }, "only here"),
  ];
}

/** A frame around each op that has what is marked.
 * @param {Schedule} schedule @param {number[]} rows @param {Marked | null} marked @param {string} axis
 * @param {Theme} colours */
function markedTraces(schedule, rows, marked, axis, colours) {
  const wanted = Object.entries(marked ?? {}).filter(([, value]) => value !== null);
  const has = (/** @type {number} */ row) =>
    wanted.every(([name, value]) => schedule.ops[/** @type {keyof Marked} */ (name)][row] === value);
  const boxes = (wanted.length ? rows.filter(has) : []).map((row) => boxOf(schedule, row));
  return boxes.length ? [filled(boxes, axis, CLEAR, { color: colours.ink, width: 2 }, "marked")] : [];
}

/** @param {Schedule} schedule @param {Chosen} chosen @param {string} axis @param {Theme} colours */
function chosenTraces(schedule, { gap, row }, axis, colours) {
  const color = gap < 0 ? colours.ink : colours.accent;
  const chain = gap < 0 ? [] : through(schedule, chainOf(schedule, gap).reverse(), axis, color, colours);
  return [filled([boxOf(schedule, row, gap)], axis, CLEAR, { color, width: 2.5 }, "chosen"), ...chain];
}

/** A line through ops, on a ground that sets it off from their colours.
 * @param {Schedule} schedule @param {number[]} rows @param {string} yaxis @param {string} color
 * @param {Theme} colours */
function through(schedule, rows, yaxis, color, colours) {
  const path = pathThrough(schedule, rows);
  return [
    lines(path, yaxis, { color: colours.ground, width: 5, simplify: false }),
    { ...lines(path, yaxis, { color, width: 2.5, simplify: false }), name: "path" },
  ];
}

/** @param {Schedule[]} schedules @param {View} view @param {Theme} colours */
function memoryTraces(schedules, { device, range }, colours) {
  const last = schedules.length - 1;
  /** @type {object[]} */
  const traces = schedules.flatMap((schedule, i) => {
    if (device >= schedule.devices.length) return [];
    const steps = memorySteps(schedule, device, range);
    const [color, dash] = i === last ? [colours.accent, "solid"] : [colours.quiet, "dot"];
    const filling = i === last ? { fill: "tozeroy", fillcolor: colours.memory } : {};
    const trace = lines(steps, "y", { shape: "hv", simplify: false, width: 1.4, color, dash });
    return [{ ...trace, ...filling, name: `memory ${i}` }];
  });
  const { limit, peak, isNear } = memoryOf(schedules[last], device);
  const level = (/** @type {number} */ y, /** @type {string} */ color, /** @type {string} */ dash) =>
    lines({ x: range, y: [y, y] }, "y", { color, width: 1.4, dash });
  traces.push(level(peak, colours.ink, "dot"));
  if (isNear) traces.push({ ...level(limit, colours.limit, "dash"), name: "limit" });
  return traces;
}

/** @param {Schedule[]} schedules @param {View} view @param {Frame} frame @param {Theme} colours */
function memoryNote(schedules, { device }, frame, colours) {
  const after = schedules[schedules.length - 1];
  const { limit, peak, at, isNear } = memoryOf(after, device);
  const other = after.ops.changed ? "before" : "the other";
  const parts =
    frame.width > 800
      ? [`Activation memory of device ${device}`, `certified peak ${bytes(peak)} (dotted), during ${at}`]
      : [`Device ${device}`, `peak ${bytes(peak)}${frame.narrow ? "" : " (dotted)"}`];
  parts.push(`limit ${bytes(limit)}${isNear ? " (dashed)" : ""}`, ...(schedules.length > 1 && !frame.narrow ? [`${other} in grey`] : []));
  return note(parts.join(" · "), frame.memory.top, frame, colours);
}

/** A line of text above a panel.
 * @param {string} text @param {number} top @param {Frame} frame @param {Theme} colours */
function note(text, top, frame, colours) {
  const y = 1 - (top - 6) / (frame.memory.top + frame.memory.height);
  const xshift = frame.narrow ? -frame.left : 0; // a telephone has no room to lose
  const place = { xref: "paper", yref: "paper", x: 0, y, xshift, xanchor: "left", yanchor: "bottom", align: "left" };
  return { text: plain(text), showarrow: false, ...place, font: { size: 12.5, color: colours.ink } };
}

/** Text for plotly, which reads some tags and entities in it.
 * @param {string} text */
function plain(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}
