// Commands of ComfyUI's page: WanCore Accelerate into the graph that is open, and out of it again; and the offer to do
// so, once. Nothing is changed without the click. `models.js` says where it belongs.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { addLauncher, distribute, giveBack, insert, remove, standIn, withdraw } from "./changes.js";
import { encoded, encoders } from "./encoders.js";
import { SAMPLER, onAllGpus, samplersOf } from "./gpus.js";
import {
  ACCELERATE, ACCELERATE_VAE, accelerated, counted, graphsOf, measured, plan, titleOf, visible,
} from "./models.js";
import { TO_VIDEO, replaced, streamed, videos } from "./videos.js";

const OFFER = "WanCore.Accelerate.Offer";
const root = () => app.rootGraph ?? app.graph;

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

function select(added) {
  const shown = added.map((node) => visible(root(), app.canvas.graph, node)).filter(Boolean);
  app.canvas.deselectAll();
  app.canvas.selectItems([...new Set(shown)]);
}

const behind = ({ wires }) => wires.map((one) => insert(one, ACCELERATE_VAE));
const told = (...lines) => lines.filter(Boolean).join(" ");

function accelerate() {
  answer();
  const found = plan(root()), decoded = videos(root()), vaes = encoders(root());
  const more = decoded.pairs.length + vaes.wires.length > 0, changes = found.wires.length > 0 || more;
  if (changes) {
    select(change(() => [...found.wires.map((one) => insert(one)), ...decoded.pairs.map(standIn), ...behind(vaes)]));
  }
  say(changes ? "success" : found.there || found.own ? "info" : "warn", told(accelerated(found, more), streamed(decoded), encoded(vaes)));
}

function runOnAllGpus() {
  answer();
  const { runs, refused } = onAllGpus(root()), decoded = videos(root()), vaes = encoders(root());
  if (refused.length) return say("warn", `Nothing is changed: ${refused.join("; ")}.`);
  const nodes = change(() => {
    const launcher = addLauncher(runs[0]);
    const samplers = runs.flatMap((run) => distribute(run, launcher));
    return [launcher, ...samplers, ...decoded.pairs.map(standIn), ...behind(vaes)];
  });
  select(nodes);
  const samplers = counted(new Set(runs.flatMap(({ first, last }) => [first, last])).size, "sampler");
  const done = `WanCore Sampler on all GPUs is in the place of ${samplers} (muted). Ctrl+Z takes it back.`;
  say("success", told(done, streamed(decoded), encoded(vaes)));
}

function takeOut() {
  const nodes = graphsOf(root()).flatMap((graph) => graph.nodes.map((node) => [graph, node]));
  const added = nodes.filter(([, node]) => [ACCELERATE, ACCELERATE_VAE].includes(node.type));
  const inPlace = (type, search) => nodes.flatMap(([graph, node]) => {
    const others = node.type === type ? search(graph, node) : null;
    return others ? [[graph, node, others]] : [];
  });
  const pairs = inPlace(TO_VIDEO, replaced), runs = inPlace(SAMPLER, samplersOf);
  const count = added.length + pairs.length + runs.length, left = [];
  if (count) {
    change(() => {
      pairs.forEach((one) => giveBack(...one));
      runs.forEach((one) => withdraw(...one));
      left.push(...added.filter((one) => !remove(...one)));
    });
  }
  const taken = count - left.length;
  say("info", told(
    taken ? `${counted(taken, "node")} taken out; Ctrl+Z brings back.` : count ? "" : "There is none in this graph.",
    ...left.map(([, node]) => `${titleOf(node)} is bypassed: its subgraph has nothing else on that wire.`),
    ...nodes.filter(([graph, node]) => node.type === TO_VIDEO && graph.nodes.includes(node)).map(([, node]) =>
      `${titleOf(node)} stays: no muted VAE Decode and Create Video have its latents and its VAE.`),
  ));
}

const COMMANDS = [
  { id: "WanCore.Accelerate", label: "WanCore: accelerate this workflow", icon: "pi pi-bolt", function: accelerate },
  { id: "WanCore.AllGpus", label: "WanCore: run this workflow on all GPUs", icon: "pi pi-server", function: runOnAllGpus },
  { id: "WanCore.TakeOut", label: "WanCore: take it out again", icon: "pi pi-eraser", function: takeOut },
];

const { system, devices = [] } = await api.getSystemStats().catch(() => ({}));
// Several GPUs run one video on Linux alone.
const several = ["linux", "posix"].includes(system?.os) && devices.filter((one) => one.type === "cuda").length > 1;
const OFFERED = COMMANDS.filter((one) => several || one.function !== runOnAllGpus);

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
    "align-items:center;width:max-content;max-width:90vw;padding:10px 14px;border-radius:8px;font-size:14px;" +
    "box-shadow:0 2px 12px #0008;" +
    "background:var(--comfy-menu-bg);color:var(--input-text);border:1px solid var(--border-color)";
  bar.append(`WanCore can make this Wan workflow faster. The video stays the same but for rounding. ${measured(devices)}`);
  const never = () => app.extensionManager.setting.set(OFFER, false);
  for (const [label, work] of [["Accelerate", accelerate], ["Not now", null], ["Never ask", never]]) {
    const button = document.createElement("button");
    button.textContent = label;
    button.style.cssText = `white-space:nowrap;padding:4px 10px;border-radius:6px;cursor:pointer;border:1px solid var(--border-color);${
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
  menuCommands: [{ path: ["Extensions", "WanCore"], commands: OFFERED.map((one) => one.id) }],
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
  getCanvasMenuItems: () => [null, ...OFFERED.map((one) => ({ content: one.label, callback: one.function }))],
  afterConfigureGraph: () => setTimeout(offer, 500), // other packs may change the graph first
});
