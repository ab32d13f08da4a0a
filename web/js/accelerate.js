// Commands of ComfyUI's page: WanCore Accelerate into the graph that is open, and out of it again; and the offer to do
// so, once. Nothing is changed without the click. `models.js` says where it belongs.
import { app } from "../../../scripts/app.js";
import {
  ACCELERATE, accelerated, counted, freePlace, graphsOf, linkInto, linksFrom, plan, visible,
} from "./models.js";

const OFFER = "WanCore.Accelerate.Offer";
const root = () => app.rootGraph ?? app.graph;
const SIZE = [320, 300]; // of an added node: its text after a run has room
const INSIDE = -10; // ids of a subgraph's two ends
const OUTSIDE = -20;

// A wire before and behind a node may begin or end at the ends of a subgraph.
function connect(graph, from, slot, to, at, reroute) {
  const [source, target] = [graph.getNodeById(from), graph.getNodeById(to)];
  if (source && target) source.connect(slot, target, at, reroute);
  else if (target && Number(from) === INSIDE) graph.inputs[slot].connect(target.inputs[at], target, reroute);
  else if (source && Number(to) === OUTSIDE) graph.outputs[at].connect(source.outputs[slot], source, reroute);
}

function insert({ graph, node, slot, ends }) {
  const added = LiteGraph.createNode(ACCELERATE);
  graph.add(added);
  added.setSize([Math.max(added.size[0], SIZE[0]), Math.max(added.size[1], SIZE[1])]);
  added.pos = freePlace(graph.nodes.filter((one) => one !== added), ends[0][0], added.size);
  const [first, at] = ends[0]; // its link may go through reroutes: they stay
  const reroute = linkInto(graph, first, at)?.parentId;
  node.connect(slot, added, added.findInputSlot("model"), reroute);
  for (const [target, input] of ends) added.connect(0, target, input);
  return added;
}

function remove(graph, node) {
  const before = linkInto(graph, node, node.findInputSlot("model"));
  for (const after of before ? linksFrom(graph, node, 0) : []) {
    connect(graph, before.origin_id, before.origin_slot, after.target_id, after.target_slot, before.parentId);
  }
  graph.remove(node);
}

// Changes to the graph as one step of undo.
function change(work) {
  app.canvas.emitBeforeChange();
  try {
    return work();
  } finally {
    app.canvas.emitAfterChange();
    app.canvas.setDirty(true, true);
  }
}

function say(severity, detail) {
  app.extensionManager.toast.add({ severity, summary: "WanCore Accelerate", detail, life: 15_000 });
}

function accelerate() {
  answer();
  const found = plan(root());
  if (found.wires.length) {
    const added = change(() => found.wires.map(insert));
    const shown = added.map((node) => visible(root(), app.canvas.graph, node)).filter(Boolean);
    app.canvas.deselectAll();
    app.canvas.selectItems([...new Set(shown)]);
  }
  say(found.wires.length ? "success" : found.there ? "info" : "warn", accelerated(found));
}

function takeOut() {
  const nodes = graphsOf(root()).flatMap((graph) =>
    graph.nodes.filter((node) => node.type === ACCELERATE).map((node) => [graph, node]),
  );
  if (nodes.length) change(() => nodes.forEach(([graph, node]) => remove(graph, node)));
  const done = `${counted(nodes.length, "node")} taken out; Ctrl+Z brings back.`;
  say("info", nodes.length ? done : "There is none in this graph.");
}

const COMMANDS = [
  { id: "WanCore.Accelerate", label: "WanCore: accelerate this workflow", icon: "pi pi-bolt", function: accelerate },
  { id: "WanCore.TakeOut", label: "WanCore: take it out again", icon: "pi pi-eraser", function: takeOut },
];

// The offer: a bar below the graph. Once answered, or not answered for a while, it does not come again.
const SHOWN = 60_000; // ms
let answered = false;
let bar = null;

function closeOffer() {
  bar?.remove();
  bar = null;
}

function answer(work) {
  answered = true;
  closeOffer();
  work?.();
}

function offer() {
  closeOffer();
  if (answered || !app.extensionManager.setting.get(OFFER)) return;
  if (graphsOf(root()).some((graph) => graph.nodes.some((node) => node.type?.startsWith("WanCore")))) return;
  if (!plan(root()).wires.length) return;
  const own = (bar = document.createElement("div"));
  setTimeout(() => own === bar && answer(), SHOWN);
  bar.setAttribute("role", "status");
  bar.id = "wancore-offer";
  bar.style.cssText =
    "position:fixed;bottom:80px;left:50%;transform:translateX(-50%);z-index:1000;display:flex;gap:8px;" +
    "align-items:center;white-space:nowrap;padding:10px 14px;border-radius:8px;font-size:14px;" +
    "box-shadow:0 2px 12px #0008;" +
    "background:var(--comfy-menu-bg);color:var(--input-text);border:1px solid var(--border-color)";
  bar.append("WanCore can make this Wan workflow faster. The video stays the same. ");
  const never = () => app.extensionManager.setting.set(OFFER, false);
  for (const [label, work] of [["Accelerate", accelerate], ["Not now", null], ["Never ask", never]]) {
    const button = document.createElement("button");
    button.textContent = label;
    button.style.cssText = `padding:4px 10px;border-radius:6px;cursor:pointer;border:1px solid var(--border-color);${
      work === accelerate ? "background:#2f6fed;color:#fff" : "background:transparent;color:inherit"
    }`;
    button.onclick = () => answer(work);
    bar.append(button);
  }
  document.body.append(bar);
}

app.registerExtension({
  name: "WanCore.accelerate",
  commands: COMMANDS,
  menuCommands: [{ path: ["Extensions", "WanCore"], commands: COMMANDS.map((one) => one.id) }],
  settings: [
    {
      id: OFFER,
      category: ["WanCore", "Accelerate", "Offer"],
      name: "Offer to accelerate workflows with Wan models",
      tooltip: "A bar below the graph, once while the page is open. The command is in the palette either way.",
      type: "boolean",
      defaultValue: true,
    },
  ],
  getCanvasMenuItems: () => [null, ...COMMANDS.map((one) => ({ content: one.label, callback: one.function }))],
  afterConfigureGraph: () => setTimeout(offer, 500), // other packs may change the graph first
});
