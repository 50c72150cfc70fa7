// Moving an op to another place of its device's program: with the mouse, a finger, or Alt and an arrow key. What it breaks is
// asked of the service while the op is still held.
import { OUTWARD } from "/page/picture/data.js";
import { element } from "/page/picture/panel.js";
import { hit } from "/page/picture/pointer.js";
import { ms, opName, percent } from "/page/picture/words.js";
import { notice } from "./parts.js";
/** @import { Schedule } from "/page/picture/data.js" */
/** @import { Shown } from "/page/picture/picture.js" */

/** @typedef {{device: number, from: number, to: number}} Move */

const HELD = 5; // pixels from which on a press is a drag

/** Programs after a move.
 * @param {string[][]} programs @param {Move} move */
export function after(programs, { device, from, to }) {
  const changed = programs.slice();
  changed[device] = programs[device].slice();
  changed[device].splice(to, 0, ...changed[device].splice(from, 1));
  return changed;
}

/** The place of an op in a program, also of one of a pair.
 * @param {string[]} program @param {string} name */
function placeIn(program, name) {
  return program.findIndex((text) => text.split("+").includes(name));
}

/** Where an op comes to stand if it is let go at a time: before the first op on the same stream whose middle is later.
 * @param {Schedule} schedule what is drawn
 * @param {string[]} program of the op's device
 * @param {number} row the op
 * @param {number} time @returns {Move} */
export function target(schedule, program, row, time) {
  const { ops } = schedule;
  const device = ops.device[row];
  const stream = (/** @type {number} */ each) => (ops.lane[each] < OUTWARD ? 0 : ops.lane[each]);
  const from = placeIn(program, opName(schedule, row));
  const rest = program.filter((_, i) => i !== from);
  let last = -1;
  /** @type {Map<string, number>} */
  const rows = new Map();
  for (let each = 0; each < ops.kind.length; each++)
    if (ops.device[each] === device) rows.set(opName(schedule, each), each);
  for (let i = 0; i < rest.length; i++) {
    const other = rows.get(rest[i].split("+")[0]);
    if (other === undefined || stream(other) !== stream(row)) continue;
    if ((ops.start[other] + ops.end[other]) / 2 > time) return { device, from, to: i };
    last = i;
  }
  return { device, from, to: last + 1 };
}

/** What a judged schedule is worth beside the one that was made, which takes `made` ms.
 * @param {{rows: {wrong: string[]}[], figure: any}} reply @param {number} made @param {boolean} untouched nothing was moved yet */
export function verdictOn({ rows, figure }, made, untouched) {
  const [{ wrong }] = rows;
  const takes = figure ? figure.schedules[0].makespan_ms : null;
  const off = takes === null ? 0 : takes / made - 1;
  const than = Math.abs(off) < 1e-9 ? "as long as it was" : `${percent(Math.abs(off))} ${off > 0 ? "longer" : "shorter"} than it was`;
  const hint = untouched ? " Drag an op along its device, or choose one and press Alt and an arrow key." : "";
  if (!wrong.length) return notice("good", `Valid: ${ms(takes)}, ${than}.${hint}`);
  const told = wrong.slice(0, 4).map((text) => text.split("\n")[0]);
  if (wrong.length > 4) told.push(`and ${wrong.length - 4} more`);
  const list = element("ul", "", ...told.map((text) => element("li", "", text)));
  const said = takes === null ? "These programs cannot run" : `Not valid; ${ms(takes)}, ${than}`;
  return element("div", "notice wrong", element("strong", "", said), list);
}

/** Listens for moves in a picture of one schedule, until the signal.
 * @param {Shown} shown
 * @param {{schedule: () => Schedule, programs: () => string[][], hold: (move: Move) => void,
 *   drop: (move: Move, name: string) => void, cancel: () => void}} edited
 * @param {AbortSignal} signal */
export function edit(shown, edited, signal) {
  const { plot } = shown;
  /** @type {{row: number, x: number, y: number, ghost: HTMLElement | null, move: Move | null} | null} */
  let dragged = null;
  const release = () => {
    dragged?.ghost?.remove();
    dragged = null;
  };
  const press = (/** @type {PointerEvent} */ event) => {
    const place = event.button ? null : shown.placeOf(event);
    const at = place && hit(edited.schedule(), place);
    if (at && at.gap < 0) dragged = { row: at.row, x: event.clientX, y: event.clientY, ghost: null, move: null };
  };
  const drag = (/** @type {PointerEvent} */ event) => {
    if (!dragged || (!dragged.ghost && Math.abs(event.clientX - dragged.x) < HELD)) return;
    dragged.ghost ??= document.body.appendChild(element("div", "dragged", opName(edited.schedule(), dragged.row)));
    dragged.ghost.style.left = `${event.clientX + 12}px`;
    dragged.ghost.style.top = `${event.clientY + 12}px`;
    const place = shown.placeOf(new MouseEvent("x", { clientX: event.clientX, clientY: dragged.y }));
    if (!place) return;
    const program = edited.programs()[edited.schedule().ops.device[dragged.row]];
    const move = target(edited.schedule(), program, dragged.row, place.time);
    if (move.to === dragged.move?.to) return;
    dragged.move = move;
    edited.hold(move);
  };
  const drop = () => {
    const held = dragged;
    release();
    if (!held?.move) return;
    if (held.move.to === held.move.from) edited.cancel();
    else edited.drop(held.move, opName(edited.schedule(), held.row));
  };
  const giveUp = () => {
    if (!dragged) return;
    release();
    edited.cancel();
  };
  const step = (/** @type {KeyboardEvent} */ event) => {
    const chosen = shown.chosen();
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!event.altKey || !by || !chosen || chosen.gap >= 0) return;
    event.preventDefault();
    const schedule = edited.schedule();
    const device = schedule.ops.device[chosen.row];
    const program = edited.programs()[device];
    const name = opName(schedule, chosen.row);
    const from = placeIn(program, name);
    if (from + by >= 0 && from + by < program.length) edited.drop({ device, from, to: from + by }, name);
  };
  plot.addEventListener("pointerdown", press, { capture: true, signal });
  for (const name of ["mousedown", "touchstart"]) // by which plotly begins a zoom
    plot.addEventListener(name, (event) => dragged && event.stopPropagation(), { capture: true, signal });
  window.addEventListener("pointermove", drag, { signal });
  window.addEventListener("pointerup", drop, { signal });
  window.addEventListener("pointercancel", giveUp, { signal }); // a finger that scrolls the page
  window.addEventListener("keydown", (event) => event.key === "Escape" && giveUp(), { signal });
  plot.addEventListener("keydown", step, { signal });
  signal.addEventListener("abort", release);
}
