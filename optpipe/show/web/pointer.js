// What the mouse and the keyboard do: hover tells what lies there, a click chooses it, Ctrl and the wheel zoom.
import { NOWHERE, OUTWARD, chainOf, firstIndex, followers, gapAt, spanOf } from "./data.js";
import { placeAt, within } from "./layout.js";
import { element } from "./panel.js";
import { WAITS, ms, opName, reason, waitOf, when } from "./words.js";
/** @import { Schedule } from "./data.js" */
/** @import { Chosen } from "./draw.js" */
/** @import { Frame } from "./layout.js" */

const STILL = 4; // pixels within which a press is a click

/** What lies at a place of a panel: an op, a gap or nothing.
 * @param {Schedule} schedule @param {{time: number, device: number, within: number}} place
 * @returns {Chosen | null} */
export function hit(schedule, { time, device, within: height }) {
  const { ops } = schedule;
  const isAt = (/** @type {number} */ lane) => {
    const [top, bottom] = within(schedule, lane);
    return height >= top && height <= bottom;
  };
  for (const lane of schedule.lanes[device])
    for (let i = firstIndex(lane.length, (k) => ops.end[lane[k]] > time); ops.start[lane[i]] <= time; i++)
      if (isAt(ops.lane[lane[i]])) return { schedule: schedule.index, gap: -1, row: lane[i] };
  const gap = gapAt(schedule, device, time);
  return gap >= 0 && isAt(0) ? { schedule: schedule.index, gap, row: -1 } : null;
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
    const right = plot.getBoundingClientRect().right;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, right - tip.offsetWidth))}px`;
    const isLow = event.clientY + 18 + tip.offsetHeight > document.documentElement.clientHeight;
    tip.style.top = `${isLow ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18}px`;
  });
  plot.addEventListener("pointerleave", () => (tip.hidden = true));

  /** @type {{x: number, y: number, at: Chosen | null} | null} */
  let pressed = null;
  const press = (/** @type {PointerEvent} */ event) =>
    (pressed = event.button ? null : { x: event.clientX, y: event.clientY, at: under(event) });
  const release = (/** @type {PointerEvent} */ event) => {
    if (pressed && Math.hypot(event.clientX - pressed.x, event.clientY - pressed.y) < STILL) picture.choose(pressed.at);
    pressed = null;
  };
  const wheel = (/** @type {WheelEvent} */ event) => {
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
  };
  plot.addEventListener("pointerdown", press, true);
  // Plotly covers the page while a button is down, so the release is seen by the window only.
  window.addEventListener("pointerup", release, { capture: true, signal });
  plot.addEventListener("dblclick", () => picture.zoom(null));
  plot.addEventListener("wheel", wheel, { passive: false });
  plot.addEventListener("keydown", (event) => {
    const schedules = picture.schedules();
    const chosen = picture.chosen();
    const next = event.altKey ? null : moved(schedules, chosen, event.key);
    if (event.key === "Escape") picture.choose(null);
    else if (event.key === "+" || event.key === "-") {
      const [from, to] = picture.range();
      const { begin, end } = chosen ? spanOf(schedules[chosen.schedule], chosen) : { begin: NaN, end: NaN };
      const at = (begin + end) / 2; // around what is chosen, where that is in sight
      const middle = at > from && at < to ? at : (from + to) / 2;
      const half = (to - from) * (event.key === "+" ? 0.25 : 1);
      picture.zoom([middle - half, middle + half]);
    } else if (next) picture.choose(next);
    else return;
    event.preventDefault();
  });
  return placeOf;
}

/** What an arrow key leads to: the op before or behind, or the one at that time on the device above or below.
 * @param {Schedule[]} schedules @param {Chosen | null} chosen @param {string} key @returns {Chosen | null} */
function moved(schedules, chosen, key) {
  if (!key.startsWith("Arrow")) return null;
  const schedule = schedules[chosen?.schedule ?? 0];
  const { ops, lanes, index } = schedule;
  const op = (/** @type {number | undefined} */ row) => (row === undefined ? null : { schedule: index, gap: -1, row });
  if (!chosen) return op(lanes[0][0][0]);
  const { device, begin, end } = spanOf(schedule, chosen);
  const isAside = chosen.gap < 0 && ops.lane[chosen.row] >= OUTWARD; // on a lane beside compute
  const to = device + (key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0);
  if (to < 0 || to >= lanes.length) return null;
  const lane = lanes[to][to === device && isAside ? ops.lane[chosen.row] - 2 : 0];
  const nearest = (/** @type {number} */ time) =>
    op(lane[Math.min(lane.length - 1, firstIndex(lane.length, (i) => ops.end[lane[i]] > time))]);
  if (to !== device) {
    const [top, bottom] = within(schedule, 0);
    return hit(schedule, { time: begin, device: to, within: (top + bottom) / 2 }) ?? nearest(begin);
  }
  const isRight = key === "ArrowRight";
  if (chosen.gap >= 0) return nearest(isRight ? end : begin - 1e-9);
  const gap = isAside ? -1 : gapAt(schedule, device, isRight ? end : begin - 1e-9 * (1 + begin));
  return gap >= 0 ? { schedule: index, gap, row: -1 } : op(lane[lane.indexOf(chosen.row) + (isRight ? 1 : -1)]);
}
