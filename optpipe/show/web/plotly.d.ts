// What the picture uses of plotly.min.js, which the page runs before its own code.
declare const Plotly: {
  react(element: HTMLElement, traces: object[], layout: object, config: object): Promise<void>;
};
