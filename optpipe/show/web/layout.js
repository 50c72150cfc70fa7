// Where everything lies: a panel for each schedule, one row a device, and the memory panel, all on one time axis.
import { LOWER, NOWHERE, OUTWARD, UPPER } from "./data.js";
/** @import { Schedule } from "./data.js" */

/** Of text, lines and grounds, as page.css has them for light and for dark. */
const NAMES = /** @type {const} */ (["ink", "quiet", "line", "ground", "idle", "wait", "hatch", "accent", "limit", "memory"]);
/** @typedef {Record<typeof NAMES[number], string>} Theme */

/** @returns {Theme} */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const colours = NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]);
  return /** @type {Theme} */ (Object.fromEntries(colours));
}

/** Calls back when the reader's preference between light and dark changes.
 * @param {() => void} changed @param {AbortSignal} signal ends it */
export function onThemeChange(changed, signal) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed, { signal });
}

/**
 * @typedef {{top: number, height: number, devices: number}} Panel
 * @typedef {{width: number, height: number, panels: Panel[], memory: {top: number, height: number},
 *   left: number, right: number, narrow: boolean}} Frame
 */

const LEFT = 64;
const RIGHT = 14;
const TITLE = 26; // above each panel
const BETWEEN = 12;
const AXIS = 40; // below the last panel
const MEMORY = 150;
const ALL_ROWS = 520; // all schedules' rows together have about this height
const MOST_ROW = 62;
const LEAST_ROW = 7;
const NARROWEST = 420; // below this there is no room for long titles

/** All places, in pixels.
 * @param {Schedule[]} schedules @param {number} width @returns {Frame} */
export function frameOf(schedules, width) {
  const rows = schedules.reduce((sum, { devices }) => sum + devices.length, 0);
  const row = Math.max(LEAST_ROW, Math.min(MOST_ROW, ALL_ROWS / rows));
  let top = 0;
  const panels = schedules.map(({ devices }) => {
    const panel = { top: top + TITLE, height: Math.max(40, devices.length * row), devices: devices.length };
    top = panel.top + panel.height + BETWEEN;
    return panel;
  });
  const known = schedules.every(({ memory }) => memory);
  const memory = known ? { top: top + TITLE, height: MEMORY } : { top: top - BETWEEN, height: 0 };
  const height = memory.top + memory.height + AXIS;
  return { width, height, panels, memory, left: LEFT, right: width - RIGHT, narrow: width < NARROWEST };
}

/** The top and the bottom of an op within its device's row, which is from 0 to 1.
 * @param {Schedule} schedule @param {number} lane @returns {[number, number]} */
export function within({ beside }, lane) {
  const share = beside.length === 1 ? 0.26 : 0.19;
  const bottom = beside.length ? 0.9 - share * beside.length : 0.94;
  if (lane === UPPER) return [0.06, (0.06 + bottom) / 2];
  if (lane === LOWER) return [(0.06 + bottom) / 2, bottom];
  if (lane < OUTWARD || lane === NOWHERE) return [0.06, bottom];
  const place = beside.indexOf(lane - LOWER);
  return [bottom + 0.03 + share * place, bottom + share * (place + 1)];
}

/** Plotly's layout of a frame, for the time from `from` to `to`.
 * @param {Schedule[]} schedules @param {Frame} frame @param {[number, number]} range @param {number} latest
 * @param {number} device whose memory is drawn
 * @param {Theme} theme @param {boolean} grid */
export function plotlyLayout(schedules, frame, range, latest, device, theme, grid) {
  const domain = (/** @type {{top: number, height: number}} */ { top, height }) => [
    Math.max(0, 1 - (top + height) / (frame.height - AXIS)),
    1 - top / (frame.height - AXIS),
  ];
  const axis = { zeroline: false, fixedrange: true, tickfont: { size: 11 }, linecolor: theme.line };
  const shown = schedules.filter(({ devices }) => device < devices.length).map((each) => memoryOf(each, device));
  const tallest = Math.max(1, ...shown.flatMap(({ peak, limit, isNear }) => (isNear ? [peak, limit] : peak)));
  /** @type {Record<string, unknown>} */
  const layout = {
    width: frame.width,
    height: frame.height,
    margin: { l: LEFT, r: RIGHT, t: 0, b: AXIS, pad: 0 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: theme.quiet },
    showlegend: false,
    hovermode: false,
    dragmode: "zoom",
    xaxis: {
      ...{ range, minallowed: 0, maxallowed: latest, anchor: frame.memory.height ? "y" : `y${schedules.length + 1}`, zeroline: false },
      ...{ gridcolor: theme.line, showgrid: grid },
      ...{ ticksuffix: " ms", tickfont: { size: 11 }, ticklabelstandoff: 4, tickangle: 0 },
      nticks: Math.max(3, Math.min(12, Math.floor(frame.width / 80))),
    },
    yaxis: {
      ...{ ...axis, domain: domain(frame.memory), range: [0, tallest * 1.08], gridcolor: theme.line },
      ...{ nticks: 4, tickformat: ".3~s", ticksuffix: "B" },
    },
  };
  frame.panels.forEach((panel, i) => {
    const [top, bottom] = within(schedules[i], 0);
    const middle = (top + bottom) / 2;
    const step = Math.ceil(panel.devices / Math.max(1, panel.height / 13));
    const named = Array.from({ length: Math.ceil(panel.devices / step) }, (_, k) => k * step);
    layout[`yaxis${i + 2}`] = {
      ...axis,
      domain: domain(panel),
      range: [-panel.devices, 0],
      showgrid: false,
      tickvals: named.map((d) => -d - middle),
      ticktext: named.map((d) => `device ${d}`),
      ticklen: 0,
    };
  });
  return layout;
}

/** The memory of a device, or of the last one; a limit that is far above the peak is not drawn.
 * @param {Schedule} schedule @param {number} device */
export function memoryOf({ devices }, device) {
  const { limit, peak, at } = devices[Math.min(device, devices.length - 1)];
  return { limit, peak, at, isNear: limit <= 3 * peak };
}

/** What lies at a point of the picture: the schedule, the time, and the device with the place in its row.
 * @param {Frame} frame @param {[number, number]} range @param {number} x @param {number} y */
export function placeAt(frame, [from, to], x, y) {
  if (x < frame.left || x > frame.right) return null;
  const time = from + ((x - frame.left) / (frame.right - frame.left)) * (to - from);
  const panel = frame.panels.findIndex(({ top, height }) => y >= top && y < top + height);
  if (panel < 0) return null;
  const { top, height, devices } = frame.panels[panel];
  const row = ((y - top) / height) * devices;
  return { panel, time, device: Math.min(devices - 1, Math.floor(row)), within: row - Math.floor(row) };
}
