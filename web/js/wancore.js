// Shows what WanCore's nodes say: on the node, what a loader recognised, the plan in one line, how long a run took; as a
// toast, warnings and this pack's errors, whose sentence the page hides behind two clicks.
//
// ComfyUI's page has a place for text on a node, which it fills from `progress_text` events. A result that comes from
// the cache sends no such event, only `executed`. The page knows nodes of the graph that is open alone, and newer ones
// take all texts away when a prompt has ended: what was said is kept here, with its node, and said again.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import {
  errorToast, findNode, onBox, readable, stopped, warningToast, warningsOf, withoutTexts,
} from "./texts.js";

const said = new WeakMap(); // node -> { id, text, at: whether it was at work } of what it said last
let inside = new WeakMap(); // the box that a template is -> id of a node in it -> [node, text], of this prompt
let before = new Set(); // warnings of the prompt before: a toast for each prompt of a queue would be too many
let warned = new Set(); // and of this one
let cached = new Set(); // nodes whose result it takes from the cache: what they said since then stays

let toasts = []; // that may still be open: those of the page appear below them

const root = () => app.rootGraph ?? app.graph;

function toast(message) {
  toasts.push(message);
  app.extensionManager.toast.add(message);
}

// What a node said, also for the box around it: there the user sees how a template runs.
function note(node, id, text, at) {
  said.set(node, { id, text, at });
  const box = id.includes(":") && findNode(root(), id.split(":")[0]);
  if (!box || onBox([node, text]) === null) return;
  if (!inside.has(box)) inside.set(box, new Map());
  inside.get(box).set(id, [node, text]);
  said.set(box, { id: String(box.id), text: onBox(...inside.get(box).values()), at });
  if (app.canvas?.graph === root()) show(said.get(box));
}

function keep(id, text, at) {
  const node = findNode(root(), id);
  if (!node?.type?.startsWith("WanCore")) return false;
  note(node, String(id), text, at);
  for (const words of warningsOf(text)) {
    if (!before.has(words) && !warned.has(words)) toast(warningToast(words, node));
    warned.add(words);
  }
  return true;
}

function show({ id, text }, rest = {}) {
  api.dispatchCustomEvent("progress_text", { ...rest, nodeId: id, text: readable(text), readable: true });
}

// After the page's own listeners.
function showAgain() {
  setTimeout(() => {
    for (const node of app.canvas?.graph?.nodes ?? []) if (said.has(node)) show(said.get(node));
  });
}

app.registerExtension({
  name: "WanCore.text",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith("WanCore")) return;
    const before = nodeType.prototype.onSerialize;
    nodeType.prototype.onSerialize = function (saved) {
      before?.call(this, saved);
      withoutTexts(saved, this.widgets ?? []);
    };
  },
  setup() {
    api.addEventListener("progress_text", (event) => {
      const { nodeId, text, readable, ...rest } = event.detail;
      if (readable || !text || !keep(nodeId, text, true)) return;
      event.stopImmediatePropagation(); // where the page has not shown it yet
      show({ id: String(nodeId), text }, rest);
    });
    api.addEventListener("executed", ({ detail }) => {
      const id = String(detail.display_node ?? detail.node);
      let text = [detail.output?.text ?? []].flat().join("\n");
      if (text && cached.has(String(detail.node))) text = said.get(findNode(root(), id))?.text ?? text;
      if (text && keep(id, text, false)) show({ id, text });
    });
    api.addEventListener("execution_start", () => {
      [before, warned, cached, inside] = [warned, new Set(), new Set(), new WeakMap()];
    });
    api.addEventListener("execution_cached", ({ detail }) => {
      cached = new Set(detail.nodes?.map(String));
    });
    api.addEventListener("execution_error", ({ detail }) => {
      const message = errorToast(detail, findNode(root(), detail.node_id));
      if (message) toast(message);
    });
    api.addEventListener("promptQueueing", () => {
      for (const message of toasts) app.extensionManager.toast.remove(message);
      toasts = [];
    });
    for (const end of ["execution_error", "execution_interrupted"]) {
      api.addEventListener(end, ({ detail }) => {
        const node = findNode(root(), detail.node_id), last = node && said.get(node);
        if (last?.at) note(node, last.id, stopped(last.text), false);
      });
    }
    for (const end of ["execution_success", "execution_error", "execution_interrupted"]) {
      api.addEventListener(end, showAgain);
    }
    app.canvas.canvas.addEventListener("litegraph:set-graph", showAgain);
  },
});
