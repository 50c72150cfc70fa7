// What the zoom shows: while it is few enough, every op as a rectangle with its label; else one image of the panel, in
// which each pixel has the colour of what takes most of its time, as strong as the device is busy.
import { NOWHERE, firstIndex, reaching, spanOf } from "./data.js";
import { within } from "./layout.js";
/** @import { Schedule } from "./data.js" */

/**
 * @typedef {{x: (number | null)[], y: (number | null)[]}} Path
 * @typedef {[number, number, number, number]} Box x0, x1, y0 and y1
 * @typedef {{x: number[], y: number[], text: string[], colour: string[], size: number[]}} Labels
 */

export const MOST_DRAWN = 3000; // ops that are drawn one by one; the same of gaps and of changes
const LARGE = 11; // pixels of a label's letters where there is room, and at least
const SMALL = 7;
const FREE = 5; // pixels beside a label of several parts, so that two do not run together
const NARROW = 2; // beside a number, which may have smaller letters
const MOST_FIT = 0.8; // the share of ops that a longer label must fit

/** A path around boxes.
 * @param {Box[]} boxes @returns {Path} */
export function around(boxes) {
  const path = { x: /** @type {Path["x"]} */ ([]), y: /** @type {Path["y"]} */ ([]) };
  for (const [x0, x1, y0, y1] of boxes) {
    path.x.push(x0, x1, x1, x0, x0, null);
    path.y.push(y0, y0, y1, y1, y0, null);
  }
  return path;
}

/** The corners of an op, or of a gap: times, and heights on its panel's axis, where device d lies from -d down to -d - 1.
 * @param {Schedule} schedule @param {number} row @param {number} [gap] @returns {Box} */
export function boxOf(schedule, row, gap = -1) {
  const { device, begin, end } = spanOf(schedule, { gap, row });
  const [top, bottom] = within(schedule, gap < 0 ? schedule.ops.lane[row] : 0);
  return [begin, end, -device - top, -device - bottom];
}

/** @param {Schedule} schedule @param {[number, number]} range */
export function visibleRows(schedule, [from, to]) {
  return schedule.lanes.flat().flatMap((lane) => Array.from(lane.subarray(...reaching(schedule, lane, from, to))));
}

/** @param {Schedule} schedule @param {[number, number]} range */
export function visibleGaps({ gaps }, [from, to]) {
  return Array.from(gaps.row.keys()).filter((gap) => gaps.end[gap] > from && gaps.begin[gap] < to);
}

/** @type {Map<string, number>} */
const widths = new Map();
const pen = document.createElement("canvas").getContext("2d");

/** The width of a label in large letters, in pixels.
 * @param {string} text */
function widthOf(text) {
  let width = widths.get(text);
  if (width === undefined) {
    if (pen) pen.font = `${LARGE}px system-ui, sans-serif`;
    widths.set(text, (width = pen ? pen.measureText(text).width : text.length * LARGE));
  }
  return width;
}

/** Labels where there is room: the micro-batch, in smaller letters if need be; where most ops have more, with the
 * kind, and with the stage in front where devices have several.
 * @param {Schedule} schedule @param {number[]} rows @param {[number, number]} range @param {number} pixelsPerMs
 * @param {number} rowHeight @returns {Labels} */
export function labels(schedule, rows, range, pixelsPerMs, rowHeight) {
  const { ops, colours, letters, stages, devices } = schedule;
  /** @type {Labels} */
  const found = { x: [], y: [], text: [], colour: [], size: [] };
  const forms = [
    (/** @type {number} */ row) => `${ops.microbatch[row]}`,
    (/** @type {number} */ row) => `${letters[ops.kind[row]]}${ops.microbatch[row]}`,
    (/** @type {number} */ row) => `${ops.stage[row]}${letters[ops.kind[row]]}${ops.microbatch[row]}`,
  ].slice(0, stages.length > devices.length ? 3 : 2);
  const shown = (/** @type {number} */ row) => [Math.max(range[0], ops.start[row]), Math.min(range[1], ops.end[row])];
  const room = (/** @type {number} */ row) => {
    const [from, to] = shown(row);
    return (to - from) * pixelsPerMs;
  };
  const fits = (/** @type {string} */ text, /** @type {number} */ row) => widthOf(text) + FREE <= room(row);
  const most = (/** @type {(row: number) => string} */ form) =>
    rows.filter((row) => fits(form(row), row)).length >= MOST_FIT * rows.length;
  const form = forms.reverse().find(most) ?? forms[forms.length - 1];
  for (const row of rows) {
    const [y0, y1] = boxOf(schedule, row).slice(2);
    const high = Math.min(LARGE + 1, Math.floor((y0 - y1) * rowHeight - 1));
    const text = fits(form(row), row) ? form(row) : forms[forms.length - 1](row);
    const size = Math.min(high, Math.floor((LARGE * (room(row) - NARROW)) / widthOf(text)));
    if (size < SMALL) continue;
    const [from, to] = shown(row);
    found.x.push((from + to) / 2);
    found.y.push((y0 + y1) / 2);
    found.text.push(text);
    found.colour.push(colours[ops.colour[row]].text);
    found.size.push(size);
  }
  return found;
}

/** One panel as an image, `width` by `height` pixels, as a data URL.
 * @param {Schedule} schedule @param {[number, number]} range @param {number} width @param {number} height */
export function raster(schedule, [from, to], width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  if (!context) throw new Error("no canvas: the browser cannot draw this picture");
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = schedule.colours.map(({ fill }) => parseInt(fill.slice(1), 16));
  const scale = width / (to - from);
  const rowHeight = height / schedule.devices.length;
  const shares = new Float32Array(colours.length * width);
  schedule.lanes.forEach((lanes, device) => {
    lanes.forEach((lane, number) => {
      const [begin, end] = reaching(schedule, lane, from, to);
      if (begin === end) return;
      shares.fill(0);
      const { start, end: ends, colour } = schedule.ops;
      for (let i = begin; i < end; i++) {
        const row = lane[i];
        const x0 = Math.max(0, (start[row] - from) * scale);
        const x1 = Math.min(width, (ends[row] - from) * scale);
        const base = colour[row] * width;
        for (let x = Math.floor(x0); x < x1; x++) shares[base + x] += Math.min(x + 1, x1) - Math.max(x, x0);
      }
      const [top, bottom] = within(schedule, number && number + 2);
      const [first, last] = [Math.round((device + top) * rowHeight), Math.round((device + bottom) * rowHeight)];
      for (let x = 0; x < width; x++) {
        const pixel = mixed(colours, shares, width, x);
        for (let y = first; y < Math.max(first + 1, last); y++) pixels[y * width + x] = pixel;
      }
    });
  });
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

/** The strongest colour of a column, as opaque as all of them together are wide; as the canvas stores it.
 * @param {number[]} colours @param {Float32Array} shares @param {number} width @param {number} x */
function mixed(colours, shares, width, x) {
  let [best, most, all] = [0, 0, 0];
  for (let i = 0; i < colours.length; i++) {
    const share = shares[i * width + x];
    all += share;
    if (share > most) [best, most] = [colours[i], share];
  }
  const alpha = Math.round(255 * Math.min(1, all));
  return ((alpha << 24) | ((best & 255) << 16) | (best & 0xff00) | (best >> 16)) >>> 0;
}

/** A device's memory as steps.
 * @param {Schedule} schedule @param {number} device @param {[number, number]} range */
export function memorySteps({ memory, makespan_ms }, device, [from, to]) {
  if (!memory) return { x: [], y: [] };
  const [begin, end] = memory.begins.subarray(device, device + 2);
  const moments = memory.moment.subarray(begin, end);
  const first = Math.max(0, firstIndex(moments.length, (i) => moments[i] > from) - 1);
  const last = firstIndex(moments.length, (i) => moments[i] > to);
  const x = Array.from(moments.subarray(first, last));
  const y = Array.from(memory.bytes.subarray(begin + first, begin + last));
  return x.length ? { x: [...x, Math.min(to, makespan_ms)], y: [...y, y[y.length - 1]] } : { x, y };
}

/** A line through ops in the order of time: along the foot of each of them, below its label, and on to the next.
 * @param {Schedule} schedule @param {number[]} rows @returns {Path} */
export function pathThrough(schedule, rows) {
  const boxes = rows.filter((row) => schedule.ops.lane[row] !== NOWHERE).map((row) => boxOf(schedule, row));
  const y = boxes.map(([, , y0, y1]) => y1 + 0.1 * (y0 - y1));
  return { x: boxes.flatMap(([x0, x1]) => [x0, x1]), y: y.flatMap((foot) => [foot, foot]) };
}
