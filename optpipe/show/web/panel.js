// The text around the picture: figures, legend, where the time goes, and why a device waits. Names become text nodes.
import { OUTWARD, chainOf, followers } from "./data.js";
import { WAITS, bytes, hindrance, ms, opName, percent, reason, waitOf, when } from "./words.js";
/** @import { Document, Schedule } from "./data.js" */
/** @import { Chosen } from "./draw.js" */

const MOST_STEPS = 14; // of a chain that are listed
const MOST_WAITS = 9; // that are listed

/** @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {string | Record<string, string | number>} given its class, or its attributes
 * @param {...(Node | string)} children @returns {HTMLElementTagNameMap[T]} */
export function element(tag, given, ...children) {
  const made = document.createElement(tag);
  const attributes = typeof given === "string" ? (given ? { class: given } : {}) : given;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** A part of a page that scrolls, which the keyboard reaches, too.
 * @param {string} className @param {string} label @param {...(Node | string)} children */
export function region(className, label, ...children) {
  return element("div", { class: className, tabindex: 0, role: "region", "aria-label": label }, ...children);
}

/** A part of a page with a heading of its own.
 * @param {string} title @param {...(Node | string)} children */
export function card(title, ...children) {
  return element("section", "card", element("h2", "", title), ...children);
}

/** @param {string} className @param {string[]} head @param {(Node | string)[][]} rows
 * @param {(row: HTMLElement, index: number) => void} [made] is told each row */
export function table(className, head, rows, made) {
  const body = element("tbody", "");
  rows.forEach((cells, index) => {
    const row = element("tr", "", ...cells.map((cell) => element("td", "", cell)));
    made?.(row, index);
    body.append(row);
  });
  const heads = head.map((text) => element(text ? "th" : "td", "", text));
  return element("table", className, element("thead", "", element("tr", "", ...heads)), body);
}

/** The largest share of a device's memory that a schedule uses.
 * @param {Schedule} schedule */
export function fullest({ devices }) {
  return Math.max(...devices.map(({ peak, limit }) => peak / Math.max(1, limit)));
}

/** @param {string} text @param {() => void} act @param {string} [className] */
export function button(text, act, className = "") {
  const made = element("button", { class: className, type: "button" }, text);
  made.addEventListener("click", act);
  return made;
}

/** Hands the reader a file.
 * @param {string} name @param {BlobPart} content */
export function download(name, content) {
  const address = URL.createObjectURL(new Blob([content]));
  element("a", { href: address, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** @param {string} text @param {boolean} on @param {(on: boolean) => void} act */
export function toggle(text, on, act) {
  const made = button(text, () => {
    const now = made.getAttribute("aria-pressed") !== "true";
    made.setAttribute("aria-pressed", String(now));
    act(now);
  });
  made.setAttribute("aria-pressed", String(on));
  return made;
}

/** The title, and the figures of the last schedule beside those of the one before.
 * @param {Document} found */
export function heading({ title, schedules, lower_bound_ms, gap }) {
  const after = schedules[schedules.length - 1];
  const before = schedules.length > 1 ? schedules[0] : null;
  const full = fullest(after);
  const share = before ? after.makespan_ms / before.makespan_ms - 1 : 0;
  const from = before ? `${share > 0 ? "+" : "−"}${percent(Math.abs(share))} from ${ms(before.makespan_ms)}` : "";
  const changed = !before ? `span ${ms(after.span_ms)}` : Math.abs(share) < 5e-4 ? "as before" : from;
  const ofLimit = full > 1 ? "of the limit: does not fit" : "of the limit, fullest device";
  const tiles = [
    tile("Makespan", ms(after.makespan_ms), changed),
    tile("Bubble", percent(after.bubble), before ? `from ${percent(before.bubble)}` : "of the devices' time"),
    tile("Memory", percent(full), ofLimit, full > 1 ? "wrong" : ""),
  ];
  if (lower_bound_ms !== null && gap !== null) {
    tiles.push(tile("Gap", gap ? percent(gap) : "none", gap ? `bound ${ms(lower_bound_ms)}` : "proven optimal"));
  }
  const size = `${after.devices.length} devices, ${after.stages.length} stages, ${after.microbatches} micro-batches`;
  const about = element("p", "", [after.method, size].filter(Boolean).join(" · "));
  const names = element("div", "names", element("h1", "", title), about);
  return element("header", "", names, element("div", "tiles", ...tiles));
}

/** A figure with its name above and more about it below.
 * @param {string} name @param {string | Node} value @param {string} more @param {string} [className] */
export function tile(name, value, more, className = "") {
  const parts = [element("span", "", name), element("strong", "", value), element("span", "", more)];
  return element("div", `tile ${className}`.trim(), ...parts);
}

/** @param {Document} found */
export function legend({ kinds, schedules }) {
  const entries = kinds.map(({ letter, name, colour, text }) => entry(letter, name, colour, text));
  const several = schedules.some(({ stages, devices }) => stages.length > devices.length);
  if (several) entries.push(element("li", "", "later stages of a device are darker"));
  entries.push(entry("", "waits", "", "", "wait"), entry("", "waits for a transfer", "", "", "wait hatched"));
  if (schedules.some(({ ops }) => ops.changed))
    entries.push(entry("", "moved", "", "", "moved"), entry("", "only in this schedule", "", "", "only"));
  return element("ul", "legend", ...entries);
}

/** @param {string} letter @param {string} name @param {string} colour @param {string} text
 * @param {string} [className] */
function entry(letter, name, colour, text, className = "") {
  const mark = element("span", `mark ${className}`, letter);
  if (colour) Object.assign(mark.style, { background: colour, color: text });
  return element("li", "", mark, name);
}

/** All devices' time: what they compute, and what they wait for.
 * @param {Document} found @param {Schedule} schedule @param {boolean} named */
export function shares({ kinds }, schedule, named) {
  const whole = schedule.devices.length * schedule.makespan_ms || 1;
  const { ops, letters } = schedule;
  const busy = new Map(letters.map((letter) => [letter, 0])); // transfers run beside compute; a pair shares its time
  ops.kind.forEach((kind, row) => {
    const own = ops.lane[row] < OUTWARD ? (ops.end[row] - ops.start[row]) / (ops.lane[row] ? 2 : 1) : 0;
    busy.set(letters[kind], (busy.get(letters[kind]) ?? 0) + own);
  });
  const parts = kinds.map(({ name, colour, letter }) => ({ name, colour, className: "", ms: busy.get(letter) ?? 0 }));
  const { begin, end } = schedule.gaps;
  const waits = { device: 0, transfer: 0, start: 0, end: 0 };
  begin.forEach((from, gap) => (waits[waitOf(schedule, gap)] += end[gap] - from));
  const classes = { device: "wait", transfer: "wait hatched", start: "idle", end: "idle" };
  for (const wait of /** @type {(keyof typeof WAITS)[]} */ (Object.keys(WAITS)))
    parts.push({ name: WAITS[wait], colour: "", className: classes[wait], ms: waits[wait] });
  const bar = element("div", { class: "bar", role: "img", "aria-label": "shares of the devices' time, as listed below" });
  const list = element("ul", "shares");
  for (const { name, colour, className, ms: time } of parts) {
    if (time <= 1e-9 * whole) continue;
    const piece = element("div", className);
    piece.style.flexGrow = String(time / whole);
    const mark = element("span", `mark ${className}`);
    if (colour) piece.style.background = mark.style.background = colour;
    bar.append(piece);
    list.append(element("li", "", mark, element("span", "", name), element("b", "", percent(time / whole))));
  }
  const name = schedule.method || (schedule.index ? "after" : "before");
  const title = named ? `Where the time goes: ${name}` : "Where the time goes";
  return element("section", "", element("h2", "", title), bar, list, element("p", "hint", criticalPath(schedule)));
}

/** What the critical path consists of.
 * @param {Schedule} schedule */
function criticalPath({ ops, critical_path, makespan_ms }) {
  const parts = { compute: 0, transfers: 0, messages: makespan_ms };
  for (const row of critical_path) {
    const length = ops.end[row] - ops.start[row];
    parts[ops.lane[row] < OUTWARD ? "compute" : "transfers"] += length;
    parts.messages -= length;
  }
  const shares = Object.entries(parts).filter(([, time]) => time > 1e-9 * makespan_ms);
  const said = shares.map(([name, time]) => `${name} ${percent(time / (makespan_ms || 1))}`).join(", ");
  return `The critical path has ${critical_path.length} ops: ${said}.`;
}

/** What devices wait for, as buttons that lead to the longest such wait; before their first op and after their last all
 * devices together.
 * @param {Schedule} schedule @param {(chosen: Chosen) => void} choose */
export function listOfWaits(schedule, choose) {
  const { gaps } = schedule;
  const length = (/** @type {number} */ gap) => gaps.end[gap] - gaps.begin[gap];
  /** @type {Map<string, number[]>} */
  const groups = new Map();
  const together = { start: "devices that have not begun yet", end: "devices that have no op left" };
  for (let gap = 0; gap < gaps.row.length; gap++) {
    const wait = waitOf(schedule, gap);
    const name = wait in together ? together[/** @type {"start"} */ (wait)] : `device ${gaps.device[gap]} ${WAITS[wait]}`;
    groups.set(name, [...(groups.get(name) ?? []), gap]);
  }
  const listed = Array.from(groups, ([name, own]) => {
    const all = own.reduce((sum, gap) => sum + length(gap), 0);
    return { name, count: own.length, all, longest: own.reduce((a, b) => (length(b) > length(a) ? b : a)) };
  });
  listed.sort((one, other) => other.all - one.all);
  const items = listed.slice(0, MOST_WAITS).map(({ name, count, all, longest }) => {
    const go = () => choose({ schedule: schedule.index, gap: longest, row: -1 });
    const most = count > 1 ? `in ${count} waits, at most ${ms(length(longest))}` : `at ${ms(gaps.begin[longest])}`;
    return element("li", "", button(name, go, "link"), element("small", "", `${ms(all)}, ${most}`));
  });
  if (!items.length) return element("p", "", "No device waits.");
  return element("div", "", element("h2", "", "Where devices wait"), element("ol", "", ...items));
}

/** An op in a list: what is said of it leads to it, and when it runs.
 * @param {Schedule} schedule @param {number} row @param {string} text @param {(chosen: Chosen) => void} choose */
function opItem(schedule, row, text, choose) {
  const go = button(text, () => choose({ schedule: schedule.index, gap: -1, row }), "link");
  return element("li", "", go, element("small", "", when(schedule, row)));
}

/** Why a device waits in a gap.
 * @param {Schedule} schedule @param {number} gap @param {(chosen: Chosen) => void} choose */
export function whyGap(schedule, gap, choose) {
  const { gaps, ready, ops } = schedule;
  const [begin, end, device] = [gaps.begin[gap], gaps.end[gap], gaps.device[gap]];
  const chain = chainOf(schedule, gap);
  const title = gaps.last[gap]
    ? `Device ${device} is done at ${ms(begin)}`
    : `Why device ${device} waits ${ms(end - begin)}`;
  const made = element("div", "", element("h2", "", title), element("p", "", `From ${ms(begin)} to ${ms(end)}.`));
  const steps = chain.map((row, i) => {
    const first = `${opName(schedule, row)} ${ops.start[row] < begin ? "runs" : "starts"} as the wait begins`;
    return opItem(schedule, row, i === chain.length - 1 ? first : reason(schedule, row), choose);
  });
  const leftOut = chain.length - MOST_STEPS + 1;
  if (leftOut > 1)
    steps.splice(MOST_STEPS - 3, leftOut, element("li", "rest", `${leftOut} more, each behind the next`));
  const why = gaps.last[gap] ? "The schedule ends later because" : "It waits because";
  made.append(element("h3", "", why), element("ol", "chain", ...steps));
  const others = Array.from(ready.gap.keys()).filter((i) => ready.gap[i] === gap).map((i) => element("li", "", hindrance(schedule, i)));
  if (others.length) made.append(element("h3", "", "Meanwhile on this device"), element("ul", "", ...others));
  else if (!gaps.last[gap])
    made.append(element("p", "", "No later op of this device had its inputs before the wait was over."));
  return made;
}

/** What an op waited for, and what waited for it.
 * @param {Schedule} schedule @param {number} row @param {(chosen: Chosen) => void} choose */
export function aboutOp(schedule, row, choose) {
  const { ops } = schedule;
  const before = ops.waited_for[row];
  const why = `${reason(schedule, row)}.`;
  const go = () => choose({ schedule: schedule.index, gap: -1, row: before });
  const next = followers(schedule, row).map((each) => opItem(schedule, each, reason(schedule, each), choose));
  return element(
    "div",
    "",
    element("h2", "", `${opName(schedule, row)} on device ${ops.device[row]}`),
    element("p", "", `${when(schedule, row)}, stage ${ops.stage[row]}, micro-batch ${ops.microbatch[row]}.`),
    element("h3", "", "It starts when it does because"),
    before < 0 ? element("p", "", why) : button(why, go, "link"),
    element("h3", "", next.length ? "Its end starts" : "No op starts because it ends."),
    element("ul", "", ...next),
  );
}

/** How long devices compute, and their memory where it is known; a row shows its device in the picture.
 * @param {Document} found @param {(device: number) => void} show */
export function deviceTable({ schedules }, show) {
  const after = schedules[schedules.length - 1];
  const rows = after.devices.map(({ limit, peak, host_peak, busy_ms }, device) => [
    button(`device ${device}`, () => show(device), "link"),
    percent(busy_ms / (after.makespan_ms || 1)),
    ...(after.memory ? [bytes(peak), bytes(limit), percent(peak / Math.max(1, limit)), bytes(host_peak)] : []),
  ]);
  const head = ["device", "computes", ...(after.memory ? ["certified peak", "limit", "used", "host peak"] : [])];
  return element("section", "", element("h2", "", "Devices"), element("div", "scrolls", table("", head, rows)));
}
