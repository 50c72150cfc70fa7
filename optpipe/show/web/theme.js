// The colours of text, lines and grounds, as page.css has them for light and for dark.

/** @typedef {{ink: string, quiet: string, line: string, ground: string, idle: string, wait: string, hatch: string,
 *   accent: string, limit: string, memory: string}} Theme */

const NAMES = ["ink", "quiet", "line", "ground", "idle", "wait", "hatch", "accent", "limit", "memory"];

/** @returns {Theme} */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  return /** @type {Theme} */ (
    Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]))
  );
}

/** Calls back when the reader's preference between light and dark changes.
 * @param {() => void} changed @param {AbortSignal} signal ends it */
export function onThemeChange(changed, signal) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed, { signal });
}
