// The document that optpipe.show.figure writes, with its arrays as typed ones and what follows from them.

/**
 * @typedef {{letter: string, name: string, colour: string, text: string}} Kind
 * @typedef {{limit: number, peak: number, at: string, host_peak: number, busy_ms: number}} Device
 * @typedef {{kind: Uint8Array, stage: Uint16Array, microbatch: Uint32Array, part: Uint8Array, device: Uint16Array,
 *   lane: Uint8Array, colour: Uint16Array, start: Float64Array, end: Float64Array, waited_for: Int32Array,
 *   cause: Uint8Array, changed: Uint8Array | null}} Ops
 * @typedef {{device: Uint16Array, begin: Float64Array, end: Float64Array, row: Int32Array, last: Uint8Array}} Gaps
 * @typedef {{gap: Int32Array, row: Int32Array, since: Float64Array, held: Float64Array, hindrance: Uint8Array}} Ready
 * @typedef {{begins: Uint32Array, moment: Float64Array, bytes: Float64Array}} Memory
 * @typedef {{method: string, makespan_ms: number, span_ms: number, bubble: number, microbatches: number,
 *   devices: Device[], stages: number[], parts: number[], colours: {fill: string, text: string}[], ops: Ops,
 *   critical_path: Int32Array, gaps: Gaps, ready: Ready, memory: Memory | null, lanes: Int32Array[][],
 *   letters: string[], beside: number[], index: number}} Schedule
 * @typedef {{title: string, lower_bound_ms: number | null, gap: number | null, kinds: Kind[], letters: string[],
 *   schedules: Schedule[], diagnosis?: any}} Document
 */

export const UPPER = 1;
export const LOWER = 2;
export const OUTWARD = 3;
export const NOWHERE = 6;
const LANES = 4; // compute, outward, to the device, on the host

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };

/** The document with its arrays, each schedule with its lanes.
 * @param {string} json @returns {Document} */
export function read(json) {
  const found = JSON.parse(json, (_, value) => (value && value.base64 !== undefined ? unpacked(value) : value));
  for (const schedule of found.schedules) {
    schedule.letters = found.letters;
    schedule.lanes = laneRows(schedule);
  }
  return { ...found, schedules: together(found.schedules) };
}

/** The document of some of its schedules, in this order.
 * @param {Document} found @param {number[]} indices @returns {Document} */
export function pick(found, indices) {
  const schedules = together(indices.map((i) => found.schedules[i]));
  const used = (/** @type {Kind} */ { letter }) =>
    schedules.some(({ ops }) => ops.kind.includes(found.letters.indexOf(letter)));
  return { ...found, kinds: found.kinds.filter(used), schedules };
}

/** One document of two: the second one's schedules stand after the first one's.
 * @param {Document} one @param {Document} other @returns {Document} */
export function joined(one, other) {
  const schedules = together([...one.schedules, ...other.schedules]);
  const further = other.kinds.filter(({ letter }) => !one.kinds.some((kind) => kind.letter === letter));
  return { ...other, kinds: [...one.kinds, ...further], schedules };
}

/** The schedules of one document: numbered, and the same lanes are drawn beside compute, so that they can be compared.
 * @param {Schedule[]} schedules */
function together(schedules) {
  const beside = [1, 2, 3].filter((lane) => schedules.some(({ lanes }) => lanes.some((own) => own[lane].length)));
  return schedules.map((schedule, index) => ({ ...schedule, index, beside }));
}

/** @param {{type: keyof typeof ARRAYS, base64: string}} packed */
function unpacked({ type, base64 }) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new ARRAYS[type](bytes.buffer);
}

/** Of each device, the rows on each of its lanes by start; the ops of a pair share the first.
 * @param {Schedule} schedule @returns {Int32Array[][]} */
function laneRows({ ops, devices }) {
  /** @type {number[][][]} */
  const lanes = devices.map(() => Array.from({ length: LANES }, () => []));
  for (let row = 0; row < ops.kind.length; row++) {
    if (ops.lane[row] !== NOWHERE) lanes[ops.device[row]][Math.max(0, ops.lane[row] - LOWER)].push(row);
  }
  const byStart = (/** @type {number} */ a, /** @type {number} */ b) => ops.start[a] - ops.start[b] || a - b;
  return lanes.map((own) => own.map((rows) => Int32Array.from(rows).sort(byStart)));
}

/** The rows that started because this one had ended.
 * @param {Schedule} schedule @param {number} row */
export function followers({ ops: { waited_for } }, row) {
  /** @type {number[]} */
  const rows = [];
  for (let each = waited_for.indexOf(row); each >= 0; each = waited_for.indexOf(row, each + 1)) rows.push(each);
  return rows;
}

/** The first index from which on `test` holds, in a range in which it holds from some index on.
 * @param {number} length @param {(index: number) => boolean} test */
export function firstIndex(length, test) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (test(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The rows of a lane that reach into a time, from an index to another one; ops of one lane do not overlap.
 * @param {Schedule} schedule @param {Int32Array} rows @param {number} from @param {number} to
 * @returns {[number, number]} */
export function reaching({ ops }, rows, from, to) {
  return [
    firstIndex(rows.length, (i) => ops.end[rows[i]] > from),
    firstIndex(rows.length, (i) => ops.start[rows[i]] >= to),
  ];
}

/** The ops that a gap waited for, one after the other: from the op that ends it back to one that ran as it began. As
 * optpipe.evaluate.causes.Causes.chain.
 * @param {Schedule} schedule @param {number} gap */
export function chainOf({ ops, gaps, makespan_ms }, gap) {
  const chain = [gaps.row[gap]];
  const begin = gaps.begin[gap] + 1e-9 * (1 + makespan_ms);
  for (let row = chain[0]; ops.start[row] > begin && ops.waited_for[row] >= 0; chain.push(row))
    row = ops.waited_for[row];
  return chain;
}

/** The device of a chosen op or gap, and when it begins and ends.
 * @param {Schedule} schedule @param {{gap: number, row: number}} chosen */
export function spanOf({ ops, gaps }, { gap, row }) {
  return gap >= 0
    ? { device: gaps.device[gap], begin: gaps.begin[gap], end: gaps.end[gap] }
    : { device: ops.device[row], begin: ops.start[row], end: ops.end[row] };
}

/** The gap of a device at a time, or -1.
 * @param {Schedule} schedule @param {number} device @param {number} ms */
export function gapAt({ gaps }, device, ms) {
  const isAfter = (/** @type {number} */ i) => gaps.device[i] > device || (gaps.device[i] === device && gaps.begin[i] > ms);
  const gap = firstIndex(gaps.row.length, isAfter) - 1;
  return gap >= 0 && gaps.device[gap] === device && gaps.end[gap] > ms ? gap : -1;
}
