// Colours of WanCore's own sockets and their links, in both renderers. Sockets of ComfyUI keep those of its theme.
import { app } from "../../../scripts/app.js";

export const COLOURS = {
  WANCORE_MODEL: "#7c9cff", // near MODEL's, which is lavender
  WANCORE_WORKERS: "#4fc3b5",
  WANCORE_SKIPPING: "#ffb454",
  WANCORE_REPORT: "#9aa7b8",
};

// For the renderer of Nodes 2.0, a rule of a style sheet: what the page sets on the element itself, it takes away when
// the theme changes.
function styleRule() {
  const lines = Object.entries(COLOURS).map(([type, colour]) => `--color-datatype-${type}: ${colour};`);
  return `:root { ${lines.join(" ")} }`;
}

// For the canvas: a theme writes "" for every type that it does not know. One that knows ours is obeyed.
export function keepColours(colours) {
  for (const [type, own] of Object.entries(COLOURS)) {
    let colour = own;
    const set = (value) => (colour = value || own);
    Object.defineProperty(colours, type, { get: () => colour, set, enumerable: true, configurable: true });
  }
}

app.registerExtension({
  name: "WanCore.colours",
  setup() {
    const style = document.createElement("style");
    style.textContent = styleRule();
    document.head.append(style);
    keepColours(app.canvas.default_connection_color_byType);
    keepColours(app.canvas.constructor.link_type_colors);
  },
});
