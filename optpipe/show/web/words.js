// What the picture says: names of ops, times, sizes, and why something waits.
import { LOWER, NOWHERE, OUTWARD } from "./data.js";
/** @import { Schedule } from "./data.js" */

// As optpipe.evaluate.causes counts them.
export const Cause = { BEGIN: 0, STREAM: 1, OWN: 2, ACROSS: 3, RESTORED: 4, ISSUED: 5 };
export const Hindrance = { ORDER: 0, LENGTH: 1, MEMORY: 2 };

/** What devices wait for, as the legend names it, in the order in which it is listed. */
export const WAITS = {
  device: "waits for another device",
  transfer: "waits for a transfer",
  start: "not begun yet",
  end: "done",
};

/** A time with four digits, or all before the point; moments of one schedule need more, to be told apart.
 * @param {number} value @param {number} [digits] */
export function ms(value, digits = 4) {
  return `${Number(Math.abs(value) < 10 ** digits ? value.toPrecision(digits) : value.toFixed(0))} ms`;
}

/** @param {number} value */
export function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${unit === "B" ? value.toFixed(0) : Number(value.toPrecision(3))} ${unit}`;
    value /= 1000;
  }
  return `${Number(value.toPrecision(4))} TB`;
}

/** @param {number} share */
export function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

/** An op as everywhere else: stage, kind, micro-batch.
 * @param {Schedule} schedule @param {number} row */
export function opName({ ops, letters }, row) {
  const part = ops.part[row] ? `.${ops.part[row]}` : "";
  return `${ops.stage[row]}${letters[ops.kind[row]]}${ops.microbatch[row]}${part}`;
}

/** Each device's program as texts; a pair is one of them.
 * @param {Schedule} schedule @returns {string[][]} */
export function programsOf(schedule) {
  const { ops, devices } = schedule;
  /** @type {string[][]} */
  const programs = devices.map(() => []);
  for (let row = 0; row < ops.kind.length; row++) {
    const own = programs[ops.device[row]];
    if (ops.lane[row] === LOWER) own.push(`${own.pop()}+${opName(schedule, row)}`);
    else own.push(opName(schedule, row));
  }
  return programs;
}

/** @param {Schedule} schedule @param {number} row */
export function when({ ops }, row) {
  return `${Number(ops.start[row].toPrecision(6))} – ${ms(ops.end[row], 6)}`;
}

/** Why an op started when it did.
 * @param {Schedule} schedule @param {number} row */
export function reason(schedule, row) {
  const { ops } = schedule;
  const before = ops.waited_for[row];
  if (before < 0) return `${opName(schedule, row)} starts with the schedule`;
  const [own, other] = [opName(schedule, row), opName(schedule, before)];
  const late = ops.start[row] - ops.end[before];
  const isMoving = ops.lane[row] >= OUTWARD && ops.lane[row] !== NOWHERE;
  switch (ops.cause[row]) {
    case Cause.STREAM:
      if (ops.lane[before] === NOWHERE) return `${own} stands behind ${other}, which waits`;
      return `${own} follows ${other} on ${isMoving ? "the link of " : ""}device ${ops.device[row]}`;
    case Cause.ACROSS:
      return late > 1e-9 * (1 + schedule.makespan_ms)
        ? `${own} needs the message of ${other}, ${ms(late)} after its end on device ${ops.device[before]}`
        : `${own} needs ${other} of device ${ops.device[before]}`;
    case Cause.RESTORED:
      return `${own} needs ${other}, which brings back what it works on`;
    case Cause.ISSUED:
      return `${own} stands behind ${other} in its program`;
    default:
      return `${own} needs ${other}`;
  }
}

/** What a device waits for in a gap: a name in `WAITS`.
 * @param {Schedule} schedule @param {number} gap @returns {keyof typeof WAITS} */
export function waitOf({ ops, gaps }, gap) {
  if (gaps.last[gap]) return "end";
  let row = gaps.row[gap];
  while (ops.cause[row] === Cause.STREAM && ops.lane[ops.waited_for[row]] === NOWHERE) row = ops.waited_for[row];
  if (ops.lane[row] === NOWHERE || ops.cause[row] === Cause.RESTORED) return "transfer";
  return gaps.begin[gap] === 0 ? "start" : "device";
}

/** What speaks against an op that stood ready in a gap.
 * @param {Schedule} schedule @param {number} index of `ready` */
export function hindrance(schedule, index) {
  const { ready, ops, devices } = schedule;
  const row = ready.row[index];
  const since = `${opName(schedule, row)} could run from ${ms(ready.since[index])}`;
  if (!schedule.memory) return `${since}; the program has it later`;
  const [held, limit] = [bytes(ready.held[index]), bytes(devices[ops.device[row]].limit)];
  switch (ready.hindrance[index]) {
    case Hindrance.MEMORY:
      return `${since}, but the device would hold ${held} of ${limit}`;
    case Hindrance.LENGTH:
      return `${since}, but takes ${ms(ops.end[row] - ops.start[row])}, longer than the rest of the wait`;
    default:
      return `${since} and fits (${held} of ${limit}); the program has it later`;
  }
}
