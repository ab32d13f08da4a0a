// What the commands of accelerate.js do to a graph, and what takes it back.
import { ACCELERATE, BYPASS, INSIDE, NEVER, OUTSIDE, freePlace, linkInto, linksFrom } from "./models.js";
import { SAMPLER, accelerateBefore, same, valueOf } from "./gpus.js";
import { TO_VIDEO, linkTo } from "./videos.js";

const ALWAYS = 0; // the mode of a node that runs
const SIZE = [320, 300]; // of WanCore Accelerate: its text after a run has room

// A wire before and behind a node may begin or end at the ends of a subgraph.
function connect(graph, from, slot, to, at, reroute) {
  const [source, target] = [graph.getNodeById(from), graph.getNodeById(to)];
  if (source && target) source.connect(slot, target, at, reroute);
  else if (target && Number(from) === INSIDE) graph.inputs[slot].connect(target.inputs[at], target, reroute);
  else if (source && Number(to) === OUTSIDE) graph.outputs[at].connect(source.outputs[slot], source, reroute);
}

// The reroutes that a link goes through, from its origin on.
function reroutes(graph, link) {
  const one = link?.parentId === undefined ? null : graph.reroutes.get(link.parentId);
  return one ? [...reroutes(graph, one), one] : [];
}

// Reroutes that all links have stay before the added node; those of some are behind it, if no other link has them.
export function insert({ graph, node, slot, ends }, type = ACCELERATE) {
  const added = add(graph, type, ends[0][0]);
  const links = ends.map((end) => linkInto(graph, ...end)), chains = links.map((link) => reroutes(graph, link));
  const common = chains[0].filter((one) => chains.every((chain) => chain.includes(one)));
  const free = ({ linkIds }) => [...linkIds].every((id) => links.some((link) => link.id === id));
  const own = chains.map((chain) => chain.filter((one) => !common.includes(one) && free(one)));
  node.connect(slot, added, 0, common.at(-1)?.id);
  const made = ends.map(([target, input], n) => added.connect(0, target, input, own[n].at(-1)?.id));
  own.forEach((kept, n) => {
    if (!kept.length) return;
    for (const one of chains[n]) if (!kept.includes(one)) one.linkIds.delete(made[n].id);
    kept[0].parentId = undefined;
  });
  return added;
}

// Whether it went: a subgraph has no wire from one of its ends to another, so the only node between them is bypassed.
export function remove(graph, node) {
  const before = linkInto(graph, node, 0), ends = before ? linksFrom(graph, node, 0) : [];
  if (Number(before?.origin_id) === INSIDE && ends.some((after) => Number(after.target_id) === OUTSIDE)) {
    node.mode = BYPASS;
    return false;
  }
  for (const after of ends) {
    const [first] = reroutes(graph, after);
    if (first) first.parentId = before.parentId;
    connect(graph, before.origin_id, before.origin_slot, after.target_id, after.target_slot, after.parentId ?? before.parentId);
  }
  graph.remove(node);
  return true;
}

// What one node's first output goes to, from another node.
function handOver(graph, from, to) {
  for (const end of linksFrom(graph, from, 0)) {
    connect(graph, to.id, 0, end.target_id, end.target_slot, end.parentId);
  }
}

function add(graph, type, beside) {
  const added = LiteGraph.createNode(type);
  graph.add(added);
  if (type === ACCELERATE) added.setSize([Math.max(added.size[0], SIZE[0]), Math.max(added.size[1], SIZE[1])]);
  added.pos = freePlace(graph.nodes.filter((one) => one !== added), beside, added.size);
  return added;
}

function set(node, name, value) {
  node.widgets.find((one) => one.name === name).value = value;
}

// An input of one node also for another: what is linked to it, or its value.
function copy(graph, from, name, to, other = name) {
  const link = linkTo(graph, from, name);
  if (link) wire(graph, link, to, other);
  else if (valueOf(from, name) !== undefined) set(to, other, valueOf(from, name));
}

function wire(graph, link, to, name) {
  connect(graph, link.origin_id, link.origin_slot, to.id, to.findInputSlot(name), link.parentId);
}

export function standIn({ graph, decode, create }) {
  const added = add(graph, TO_VIDEO, create);
  copy(graph, decode, "vae", added);
  copy(graph, decode, "samples", added, "latent");
  copy(graph, create, "fps", added);
  copy(graph, create, "audio", added);
  handOver(graph, create, added);
  decode.mode = create.mode = NEVER;
  return added;
}

// WanCore Sampler in the place of samplers; the workers of `launcher` run it.
export function distribute({ graph, first, last, models }, launcher) {
  const [from, sigmas, added] = ["WanCoreFromModel", "BasicScheduler", SAMPLER].map((type) => add(graph, type, last));
  launcher.connect(0, from, from.findInputSlot("workers"));
  models.forEach((link, n) => wire(graph, link, from, ["model", "low"][n]));
  wire(graph, models[0], sigmas, "model");
  for (const name of ["scheduler", "steps"]) copy(graph, first, name, sigmas);
  from.connect(0, added, added.findInputSlot("model"));
  sigmas.connect(0, added, added.findInputSlot("sigmas"));
  copy(graph, first, "latent_image", added, "latent");
  for (const name of ["positive", "negative", "control_after_generate"]) copy(graph, first, name, added);
  copy(graph, first, first.type === "KSampler" ? "seed" : "noise_seed", added, "seed");
  copy(graph, first, "cfg", added, "guidance_high");
  copy(graph, last, "cfg", added, "guidance_low");
  if (models.length > 1) copy(graph, first, "end_at_step", added, "low_from_step");
  for (const name of ["steps", "shift", "boundary"]) set(added, name, 0); // those of `sigmas` and of the model
  const accelerate = accelerateBefore(graph, first);
  if (accelerate) for (const name of ["speed", "skipping"]) copy(graph, accelerate, name, added);
  set(added, "preset", "none");
  set(added, "solver", valueOf(first, "sampler_name"));
  handOver(graph, last, added);
  first.mode = last.mode = NEVER;
  return [added, from, sigmas];
}

export const addLauncher = ({ graph, last }) => add(graph, "WanCoreLauncher", last);

export function withdraw(graph, node, { first, last, added }) {
  handOver(graph, node, last);
  first.mode = last.mode = ALWAYS;
  for (const one of added) if (one.type !== "WanCoreLauncher" || !linksFrom(graph, one, 0).length) graph.remove(one);
}

export function giveBack(graph, node, { decode, create }) {
  for (const name of ["fps", "audio"].filter((one) => !same(graph, node, one, create))) { // changed since the click
    if (linkTo(graph, create, name)) create.disconnectInput(create.findInputSlot(name));
    copy(graph, node, name, create);
  }
  handOver(graph, node, create);
  decode.mode = create.mode = ALWAYS;
  graph.remove(node);
}
