// ComfyUI's page as far as wancore.js uses it, as frontend 1.58.1 behaves. What is not in surface.json throws.
import { readFileSync } from "node:fs";
import { api } from "./api.js";

export const surface = JSON.parse(readFileSync(new URL("./surface.json", import.meta.url)));

export function restricted(target, names) {
  return new Proxy(target, {
    get(object, name) {
      if (typeof name === "string" && !names.includes(name)) throw new Error(`the page is asked for ${name}`);
      return object[name];
    },
  });
}

export class Graph {
  constructor(nodes) {
    this.nodes = nodes;
  }
  getNodeById(id) {
    return this.nodes.find((node) => String(node.id) === String(id)) ?? null;
  }
}

const listening = new EventTarget();
const state = { root: new Graph([]), open: null };
export const toasts = [];
export const extensions = [];

export const app = restricted(
  {
    get rootGraph() {
      return state.root;
    },
    canvas: {
      get graph() {
        return state.open;
      },
      canvas: listening,
    },
    extensionManager: {
      toast: {
        add(message) {
          if (!surface.severities.includes(message.severity)) throw new Error(`severity ${message.severity}`);
          toasts.push(message);
        },
        remove(message) {
          if (toasts.includes(message)) toasts.splice(toasts.indexOf(message), 1);
        },
      },
    },
    registerExtension: (extension) => extensions.push(extension),
  },
  surface.app,
);

export function load(nodes) {
  state.root = state.open = new Graph(nodes);
  toasts.length = 0;
}

export function open(graph) {
  state.open = graph;
  listening.dispatchEvent(new CustomEvent("litegraph:set-graph"));
}

// The page's own listeners: it shows a text on a node of the graph that is open, and takes all away after a prompt.
function named(id) {
  const path = id.split(":");
  let graph = state.root;
  for (const part of path.slice(0, -1)) graph = graph.getNodeById(part)?.subgraph;
  return graph === state.open ? graph?.getNodeById(path.at(-1)) : null;
}

export function listen() {
  api.addEventListener("progress_text", ({ detail }) => {
    const node = named(String(detail.nodeId));
    if (node) node.shown = detail.text;
  });
  for (const end of ["execution_success", "execution_error", "execution_interrupted"]) {
    api.addEventListener(end, () => state.open.nodes.forEach((node) => delete node.shown));
  }
}
