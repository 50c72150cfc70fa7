// The colours of text, lines and grounds, as page.css has them for light and for dark.

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
