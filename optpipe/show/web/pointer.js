// @ts-check
// What the mouse and the keyboard do: hover tells what lies there, a click chooses it, Ctrl and the wheel zoom.
import { NOWHERE, OUTWARD, chainOf, firstIndex, followers, gapAt } from "./data.js";
import { placeAt, within } from "./layout.js";
import { element } from "./panel.js";
import { WAITS, ms, opName, reason, waitOf, when } from "./words.js";

/**
 * @typedef {import("./data.js").Schedule} Schedule
 * @typedef {import("./draw.js").Chosen} Chosen
 * @typedef {import("./layout.js").Frame} Frame
 */

const STILL = 4; // pixels within which a press is a click

/** What lies at a place of a panel: an op, a gap or nothing.
 * @param {Schedule} schedule @param {{time: number, device: number, within: number}} place
 * @returns {Chosen | null} */
export function hit(schedule, { time, device, within: height }) {
  const { ops } = schedule;
  for (const lane of schedule.lanes[device]) {
    for (
      let i = firstIndex(lane.length, (k) => ops.end[lane[k]] > time);
      i < lane.length && ops.start[lane[i]] <= time;
      i++
    ) {
      const [top, bottom] = within(schedule, ops.lane[lane[i]]);
      if (height >= top && height <= bottom) return { schedule: schedule.index, gap: -1, row: lane[i] };
    }
  }
  const gap = gapAt(schedule, device, time);
  const [top, bottom] = within(schedule, 0);
  return gap >= 0 && height >= top && height <= bottom ? { schedule: schedule.index, gap, row: -1 } : null;
}

/** The lines that the pointer shows.
 * @param {Schedule} schedule @param {Chosen} found @returns {string[]} */
export function hints(schedule, { gap, row }) {
  if (gap >= 0) {
    const { gaps } = schedule;
    const chain = chainOf(schedule, gap);
    const wait = gaps.last[gap] ? "done" : WAITS[waitOf(schedule, gap)];
    const why = gaps.last[gap] ? [] : chain.slice(0, 3).map((each) => reason(schedule, each));
    const length = ms(gaps.end[gap] - gaps.begin[gap]);
    return [`device ${gaps.device[gap]}: ${wait}, ${length}`, ...why, "click: the whole chain"];
  }
  const next = followers(schedule, row).filter((each) => schedule.ops.lane[each] !== NOWHERE);
  const named = Array.from(next.slice(0, 6), (each) => opName(schedule, each)).join(", ");
  return [
    `${opName(schedule, row)} on device ${schedule.ops.device[row]}`,
    `${when(schedule, row)} (${ms(schedule.ops.end[row] - schedule.ops.start[row])})`,
    reason(schedule, row),
    next.length ? `its end starts ${named}${next.length > 6 ? " and more" : ""}` : "nothing starts because it ends",
  ];
}

/** Listens on the picture until a signal; returns what finds the place of an event in it.
 * @param {HTMLElement} plot
 * @param {{schedules: () => Schedule[], frame: () => Frame, range: () => [number, number], chosen: () => Chosen | null,
 *   choose: (chosen: Chosen | null) => void, zoom: (range: [number, number] | null) => void}} picture
 * @param {AbortSignal} signal */
export function listen(plot, picture, signal) {
  const tip = element("div", "tip");
  tip.hidden = true;
  document.body.append(tip);
  signal.addEventListener("abort", () => tip.remove());
  const placeOf = (/** @type {MouseEvent} */ event) => {
    const box = plot.getBoundingClientRect();
    return placeAt(picture.frame(), picture.range(), event.clientX - box.left, event.clientY - box.top);
  };
  const under = (/** @type {MouseEvent} */ event) => {
    const place = placeOf(event);
    return place && hit(picture.schedules()[place.panel], place);
  };
  plot.addEventListener("pointermove", (event) => {
    const found = event.buttons ? null : under(event);
    plot.classList.toggle("over", found !== null);
    tip.hidden = found === null;
    if (!found) return;
    tip.replaceChildren(...hints(picture.schedules()[found.schedule], found).map((line) => element("div", "", line)));
    const room = document.documentElement;
    const right = plot.getBoundingClientRect().right;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, right - tip.offsetWidth))}px`;
    const below = event.clientY + 18;
    tip.style.top = `${below + tip.offsetHeight > room.clientHeight ? event.clientY - tip.offsetHeight - 12 : below}px`;
  });
  plot.addEventListener("pointerleave", () => (tip.hidden = true));

  /** @type {{x: number, y: number, at: Chosen | null} | null} */
  let pressed = null;
  plot.addEventListener(
    "pointerdown",
    (event) => (pressed = event.button ? null : { x: event.clientX, y: event.clientY, at: under(event) }),
    true,
  );
  // Plotly covers the page while a button is down, so the release is seen by the window only.
  window.addEventListener(
    "pointerup",
    (event) => {
      if (pressed && Math.hypot(event.clientX - pressed.x, event.clientY - pressed.y) < STILL)
        picture.choose(pressed.at);
      pressed = null;
    },
    { capture: true, signal },
  );
  plot.addEventListener("dblclick", () => picture.zoom(null));
  plot.addEventListener(
    "wheel",
    (event) => {
      const { left, right } = picture.frame();
      const [from, to] = picture.range();
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.ctrlKey || event.metaKey) {
        const at = from + ((event.clientX - plot.getBoundingClientRect().left - left) / (right - left)) * (to - from);
        const factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150);
        picture.zoom([at - (at - from) * factor, at + (to - at) * factor]);
      } else if (sideways) {
        const moved = (sideways / (right - left)) * (to - from);
        picture.zoom([from + moved, to + moved]);
      } else return;
      event.preventDefault();
    },
    { passive: false },
  );
  plot.addEventListener("keydown", (event) => {
    const schedules = picture.schedules();
    const next = event.altKey ? null : moved(schedules, picture.chosen(), event.key);
    if (event.key === "Escape") picture.choose(null);
    else if (event.key === "+" || event.key === "-")
      picture.zoom(scaled(picture.range(), event.key === "+" ? 0.5 : 2, timeOf(schedules, picture.chosen())));
    else if (next) picture.choose(next);
    else return;
    event.preventDefault();
  });
  return placeOf;
}

/** A time shorter or longer by a factor, around a moment where that is in it.
 * @param {[number, number]} range @param {number} factor @param {number | null} at @returns {[number, number]} */
function scaled([from, to], factor, at) {
  const middle = at !== null && at > from && at < to ? at : (from + to) / 2;
  const half = ((to - from) / 2) * factor;
  return [middle - half, middle + half];
}

/** The middle of an op or a gap.
 * @param {Schedule[]} schedules @param {Chosen | null} chosen */
function timeOf(schedules, chosen) {
  if (!chosen) return null;
  const { ops, gaps } = schedules[chosen.schedule];
  const [times, index] = chosen.gap >= 0 ? [{ start: gaps.begin, end: gaps.end }, chosen.gap] : [ops, chosen.row];
  return (times.start[index] + times.end[index]) / 2;
}

/** What an arrow key leads to: the op before or behind, or the one at that time on the device above or below.
 * @param {Schedule[]} schedules @param {Chosen | null} chosen @param {string} key @returns {Chosen | null} */
function moved(schedules, chosen, key) {
  if (!key.startsWith("Arrow")) return null;
  const index = chosen ? chosen.schedule : 0;
  const schedule = schedules[index];
  const { ops, gaps, lanes } = schedule;
  if (!chosen) return lanes[0][0].length ? { schedule: index, gap: -1, row: lanes[0][0][0] } : null;
  const row = chosen.gap >= 0 ? gaps.row[chosen.gap] : chosen.row;
  const device = chosen.gap >= 0 ? gaps.device[chosen.gap] : ops.device[row];
  const to = device + (key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0);
  if (to < 0 || to >= lanes.length) return null;
  const lane = lanes[to][to === device && ops.lane[row] >= OUTWARD ? ops.lane[row] - 2 : 0];
  const time = chosen.gap >= 0 ? gaps.begin[chosen.gap] : ops.start[row];
  if (to !== device)
    return hit(schedule, { time, device: to, within: middleOf(schedule) }) ?? nearest(schedule, lane, time);
  const place = lane.indexOf(row);
  if (chosen.gap >= 0) return nearest(schedule, lane, key === "ArrowRight" ? gaps.end[chosen.gap] : time - 1e-9);
  const next = lane[place + (key === "ArrowRight" ? 1 : -1)];
  const between =
    ops.lane[row] >= OUTWARD
      ? -1
      : gapAt(schedule, device, key === "ArrowRight" ? ops.end[row] : ops.start[row] - 1e-9 * (1 + time));
  if (between >= 0) return { schedule: index, gap: between, row: -1 };
  return next === undefined ? null : { schedule: index, gap: -1, row: next };
}

/** @param {Schedule} schedule */
function middleOf(schedule) {
  const [top, bottom] = within(schedule, 0);
  return (top + bottom) / 2;
}

/** @param {Schedule} schedule @param {Int32Array} lane @param {number} time @returns {Chosen | null} */
function nearest({ ops, index }, lane, time) {
  if (!lane.length) return null;
  const place = firstIndex(lane.length, (i) => ops.end[lane[i]] > time);
  return { schedule: index, gap: -1, row: lane[Math.min(place, lane.length - 1)] };
}
