// Where WanCore Accelerate belongs in a graph: the MODEL wires on which a Wan model is on its way to a sampler. Nothing
// here changes the graph or asks the page.
//
// A sampler is a node that takes a MODEL and gives LATENT or a GUIDER, but no MODEL unless it is called one. Its wire
// is followed upstream, out of subgraphs and into them, through every node that takes and gives a MODEL (LoRAs,
// ModelSamplingSD3, switches), to the nodes that load. The model is Wan
// - if each of these names a file of a Wan model, or else
// - if a LoRA on the wire does, or
// - if what conditions the sampler is Wan's: a node Wan..., or the text encoder of the type wan, in front of it.
// Everything else is left, and named: a model that is not known to be Wan, a sampler that is switched off.
export const ACCELERATE = "WanCoreAccelerate";
export const ACCELERATE_VAE = "WanCoreAccelerateVAE";
export const NEVER = 2; // modes of a node: muted, and bypassed
export const BYPASS = 4;
export const INSIDE = -10; // the origin of links that come into a subgraph
export const OUTSIDE = -20; // and the target of those that leave it
const WAN = /(?<![a-z])(fast)?wan(?=[^a-z]|$|animate|dancer|fun|move|vace|video|[its]{1,2}2v)/i; // in a file's name
const KINDS = /(?<![a-z])(humo|scail)(?![a-z])/i;
const CONDITIONS = ["CONDITIONING", "LATENT", "CLIP"];

// Links of a graph by what they begin and end at: newer pages warn of `input.link` and `output.links`.
const linksOf = (graph) => Object.values(graph.links);
export const is = (one, other) => String(one) === String(other);

// The link into a slot of a node.
export function linkInto(graph, node, slot) {
  return linksOf(graph).find((link) => is(link.target_id, node.id) && link.target_slot === slot) ?? null;
}

// The links out of a slot of a node, those that leave a subgraph among them.
export function linksFrom(graph, node, slot) {
  return linksOf(graph).filter((link) => is(link.origin_id, node.id) && link.origin_slot === slot);
}

// The links that these lead to, and the one that this comes from, through reroute nodes.
const rerouted = (graph, id) => [graph.getNodeById(id)].find((node) => node?.type === "Reroute");

export function past(graph, links) {
  return links.flatMap((link) => {
    const node = rerouted(graph, link.target_id);
    return node ? past(graph, linksFrom(graph, node, 0)) : [link];
  });
}

export function before(graph, link) {
  const node = link && rerouted(graph, link.origin_id);
  return node ? before(graph, linkInto(graph, node, 0)) : link;
}

// The graph, or what is inside of one subgraph node. outer: where that node is.
export class Place {
  constructor(graph, node = null, outer = null) {
    Object.assign(this, { graph, node, outer, inner: new Map() });
    this.path = outer === null ? "" : `${outer.path}${node.id}:`;
    this.on = outer === null || (outer.on && isOn(node));
    for (const each of graph.nodes) if (each.subgraph) this.inner.set(each, new Place(each.subgraph, each, this));
  }

  all() {
    return [this, ...[...this.inner.values()].flatMap((place) => place.all())];
  }

  // What the link into a slot of a node comes from: { place, node, slot }, outside of this subgraph where it comes from
  // there.
  origin(node, slot) {
    return this.begin(linkInto(this.graph, node, slot));
  }

  begin(link) {
    if (!link) return null;
    if (Number(link.origin_id) === INSIDE) return this.outer?.origin(this.node, link.origin_slot) ?? null;
    const node = this.graph.getNodeById(link.origin_id);
    return node ? { place: this, node, slot: link.origin_slot } : null;
  }

  // What SetNode has under a name, here or in the graph around: a GetNode in a subgraph sees that too.
  named(name) {
    const set = this.graph.nodes.find((one) => one.type === "SetNode" && one.widgets?.[0]?.value === name);
    return set ? this.origin(set, 0) : (this.outer?.named(name) ?? null);
  }

  // What is written on a node: the values of its widgets, or what is linked in their places.
  texts(node) {
    const linked = new Map(); // the names of widgets with a link
    (node.inputs ?? []).forEach((input, slot) => {
      const link = input.widget && linkInto(this.graph, node, slot);
      if (link) linked.set(input.widget.name, link);
    });
    const values = (node.widgets ?? []).filter(({ name }) => !linked.has(name)).map((widget) => widget.value);
    values.push(...[...linked.values()].flatMap((link) => this.given(link)));
    return values.filter((value) => typeof value === "string");
  }

  given(link) {
    if (Number(link.origin_id) !== INSIDE) {
      return (this.graph.getNodeById(link.origin_id)?.widgets ?? []).map((widget) => widget.value);
    }
    const own = this.node.inputs[link.origin_slot], outside = linkInto(this.outer.graph, this.node, link.origin_slot);
    if (outside) return this.outer.given(outside);
    const name = own?.widget?.name ?? own?.name;
    return (this.node.widgets ?? []).filter((widget) => widget.name === name).map((widget) => widget.value);
  }
}

export const isOn = (node) => node.mode !== NEVER && node.mode !== BYPASS;

export function gives(node, ...types) {
  return (node.outputs ?? []).some((output) => types.includes(output.type));
}

export const namesWan = (text) => WAN.test(text) || KINDS.test(text);
const isModel = (slot) => slot.type === "MODEL";
const modelSlots = (node) => (node.inputs ?? []).flatMap((input, slot) => (isModel(input) ? [slot] : []));

export function isSampler(node) {
  const takes = !node.subgraph && (node.inputs ?? []).some(isModel);
  return takes && gives(node, "LATENT", "GUIDER") && (!gives(node, "MODEL") || /sampler/i.test(node.type));
}

const samples = (node, slot) => isSampler(node) && isModel(node.inputs[slot]);

// Whether a link into this slot of a node goes to what `isEnd` looks for, itself or inside of a subgraph.
function leads(node, slot, isEnd) {
  if (!node?.subgraph) return Boolean(node) && isEnd(node, slot);
  return (node.subgraph.inputs[slot]?.linkIds ?? []).some((id) => {
    const link = node.subgraph.getLink(id);
    return link && leads(node.subgraph.getNodeById(link.target_id), link.target_slot, isEnd);
  });
}

// What comes out at `at` on its way, from there to the node that makes it: through bypassed nodes, Reroute, WanCore
// Accelerate VAE, out of subgraphs, from GetNode to SetNode. Ends with null where nothing makes it.
export function way(at) {
  const nodes = [];
  while (at && nodes.length < 1000) {
    nodes.push(at);
    const { place, node, slot } = at;
    if (node.mode === NEVER) {
      at = null;
    } else if (node.mode === BYPASS || node.type === ACCELERATE_VAE) {
      const type = node.outputs[slot]?.type;
      const same = node.inputs[slot]?.type === type ? slot : node.inputs.findIndex((one) => one.type === type);
      at = place.origin(node, same);
    } else if (node.type === "Reroute") {
      at = place.origin(node, 0);
    } else if (node.subgraph) {
      const inner = place.inner.get(node);
      at = inner.begin(node.subgraph.getLink(node.subgraph.outputs[slot]?.linkIds?.[0]));
    } else if (node.type === "GetNode") {
      at = place.named(node.widgets?.[0]?.value);
    } else {
      return nodes;
    }
  }
  return [...nodes, null];
}

export const maker = (at) => way(at).at(-1);

// Whether a Wan VAE comes into a node that gives a VAE or anything, as a switch does: which one it gives is not known.
export function mayGiveWan(at, seen = new Set()) {
  seen.add(at.place.path + at.node.id);
  return (at.node.inputs ?? []).some((_, slot) => {
    const from = maker(at.place.origin(at.node, slot)), type = from?.node.outputs[from.slot]?.type;
    if (!["VAE", "*"].includes(type) || seen.has(from.place.path + from.node.id)) return false;
    return (type === "VAE" && from.place.texts(from.node).some(namesWan)) || mayGiveWan(from, seen);
  });
}

// Whether a link may carry a MODEL. Switches and loops have slots of any type.
const carries = (to, from) => to === "MODEL" || from === "MODEL" || (to === "*" && from === "*");

// All nodes on a MODEL wire. found: { loaders, texts, on }: where it begins, what is written behind that, and whether
// WanCore Accelerate is on it.
export function trace(from, found = { loaders: [], texts: [], seen: new Set(), accelerated: null }) {
  if (from?.node.type === ACCELERATE) found.accelerated = from.node; // a bypassed one too
  const at = maker(from);
  if (!at) {
    found.loaders.push(null);
  } else if (at.node.type === ACCELERATE) {
    found.accelerated = at.node;
  } else if (!found.seen.has(at.place.path + at.node.id)) {
    found.seen.add(at.place.path + at.node.id);
    const models = (at.node.inputs ?? [])
      .map((input, slot) => ({ type: input.type, origin: at.place.origin(at.node, slot) }))
      .filter(({ type, origin }) => origin && carries(type, origin.node.outputs[origin.slot]?.type));
    if (models.length) found.texts.push(...at.place.texts(at.node));
    else found.loaders.push({ node: at.node, texts: at.place.texts(at.node) });
    for (const { origin } of models) trace(origin, found);
  }
  return found;
}

// Whether what conditions a sampler is Wan's. Not through other samplers, nor through pictures: these may be another
// model's.
function conditioned(place, node, seen = new Set()) {
  seen.add(place.path + node.id);
  return (node.inputs ?? []).some((input, slot) => {
    const at = CONDITIONS.includes(input.type) ? maker(place.origin(node, slot)) : null;
    if (!at || seen.has(at.place.path + at.node.id) || isSampler(at.node)) return false;
    if (/^Wan[A-Z0-9]/.test(at.node.type)) return true;
    if (/CLIPLoader/.test(at.node.type) && at.place.texts(at.node).includes("wan")) return true;
    return conditioned(at.place, at.node, seen);
  });
}

// Why the model of a sampler is left; null for a Wan model.
export function refusal({ loaders, texts }, place, node) {
  if (!loaders.length || loaders.includes(null)) return "no model is connected";
  const unknown = loaders.filter((loader) => !loader.texts.some(namesWan));
  if (!unknown.length || texts.some(namesWan) || conditioned(place, node)) return null;
  const name = unknown[0].texts.find((text) => /\.\w+$/.test(text)) ?? titleOf(unknown[0].node);
  const way = 'connect WanCore Accelerate in front of the sampler by hand, or put "wan" into the file\'s name';
  return `${name} is not known to be a Wan model: if it is one, ${way}`;
}

export function titleOf(node) {
  return node.title || node.type;
}

// What a click would do in a graph: { wires, left, there, off, own }.
// wires: { graph, inside, node, slot, ends, samplers } of outputs that lead to samplers; inside: the subgraph node that
// shows the graph; ends: [node, slot] of the links to take.
// left: why samplers are left. there: how many have WanCore Accelerate. off: how many are muted or bypassed.
// own: whether WanCore Sampler samples.
export function plan(root) {
  const wires = [], left = new Set(), refused = new Set();
  let there = 0, off = 0, own = false;
  for (const place of new Place(root).all()) {
    for (const node of place.graph.nodes) {
      const on = place.on && isOn(node);
      own ||= on && node.type === "WanCoreSampler";
      if (!isSampler(node)) {
        if (on && isStranger(place, node)) left.add(`${titleOf(node)} is no sampler that is known here`);
        continue;
      }
      if (!on) off++;
      for (const slot of on ? modelSlots(node) : []) {
        const origin = place.origin(node, slot), found = trace(origin);
        if (found.accelerated) {
          there++;
          if (!isOn(found.accelerated)) left.add(`${titleOf(found.accelerated)} is there and bypassed`);
          continue;
        }
        const why = refusal(found, place, node);
        if (why) left.add(`${titleOf(node)}: ${why}`);
        if (!origin) continue;
        let wire = wires.find((one) => one.node === origin.node && one.slot === origin.slot);
        if (!wire) wires.push((wire = { ...wireFrom(origin, samples), samplers: [] }));
        wire.samplers.push(node);
        if (why) refused.add(wire);
      }
    }
  }
  return { wires: wires.filter((wire) => !refused.has(wire) && wire.ends.length), left: [...left], there, off, own };
}

// The links from an output that lead to what `isEnd` looks for.
export function wireFrom({ place: { graph, node: inside }, node, slot }, isEnd) {
  const ends = linksFrom(graph, node, slot).map((link) => [graph.getNodeById(link.target_id), link.target_slot]);
  return { graph, inside, node, slot, ends: ends.filter((end) => leads(...end, isEnd)) };
}

// Whether a node of another pack does something with a Wan model: it has one, and gives neither MODEL nor SIGMAS; or it
// samples the models of another pack, which are no MODEL.
function isStranger(place, node) {
  if (/^WanVideo.*Sampler/.test(node.type)) return true;
  const [slot] = modelSlots(node);
  const passes = node.subgraph || node.type?.startsWith("WanCore") || gives(node, "MODEL", "SIGMAS");
  if (slot === undefined || passes || !node.outputs?.length) return false;
  const { loaders } = trace(place.origin(node, slot));
  return loaders.length > 0 && loaders.every((loader) => loader?.texts.some(namesWan));
}

// All graphs there are, each subgraph once.
export function graphsOf(root) {
  return [...new Set(new Place(root).all().map((place) => place.graph))];
}

// Which node of the graph `shown` a node is, or is inside of; null: none.
export function visible(root, shown, node) {
  for (const place of new Place(root).all()) {
    if (!place.graph.nodes.includes(node)) continue;
    for (let at = place, one = node; at; one = at.node, at = at.outer) if (at.graph === shown) return one;
  }
  return null;
}

// A point near a node, to its left if there is room, where a box of `size` covers no other.
export function freePlace(nodes, beside, size) {
  const [width, height] = size, gap = 40, title = 30;
  const [left, top] = [beside.pos[0] - width - gap, beside.pos[1]];
  const covers = ([x, y]) =>
    nodes.some(
      ({ pos, size: other }) =>
        x < pos[0] + other[0] + gap && pos[0] < x + width + gap &&
        y < pos[1] + other[1] + gap + title && pos[1] < y + height + gap + title,
    );
  const points = [];
  for (let column = -2; column <= 3; column++) {
    for (let row = -12; row <= 12; row++) points.push([left + column * (width + gap), top + row * 80]);
  }
  const distance = ([x, y]) => Math.hypot(x - left, y - top);
  points.sort((a, b) => distance(a) - distance(b));
  return points.find((point) => !covers(point)) ?? [left, top];
}

// One line of what a click did. more: whether it did something else too.
export function accelerated({ wires, left, there, off, own }, more = false) {
  const samplers = new Set(wires.flatMap((wire) => wire.samplers));
  const inside = new Set(wires.flatMap((wire) => (wire.inside ? [titleOf(wire.inside)] : [])));
  const where = inside.size ? ` in ${[...inside].join(", ")}` : "";
  const done = wires.length
    ? `${counted(wires.length, "node")} added${where}, before ${counted(samplers.size, "sampler")}. ` +
      "The video stays the same but for rounding; Ctrl+Z takes it back."
    : more
      ? "Ctrl+Z takes it back."
      : there
        ? "Nothing to add: it is there already."
        : own
          ? "Nothing to add: WanCore Sampler has all of it."
          : "Nothing to add: no Wan model was found on its way to a sampler.";
  const rest = [
    ...(there && wires.length ? [`${counted(there, "sampler")} with it before`] : []),
    ...left,
    ...(off ? [`${counted(off, "sampler")} that ${off > 1 ? "are" : "is"} muted or bypassed`] : []),
  ];
  return done + (rest.length ? ` Left: ${rest.join("; ")}.` : "");
}

export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

// How many times as fast a four-step run was after the command, from Run to file: docs/benchmarks.md.
const MEASURED = { H100: 1.46, H200: 1.69 };

// What is true of this card, for the offer. devices: as the server tells of them.
export function measured(devices) {
  const card = devices.find((one) => one.type === "cuda")?.name.replace(/^cuda:\d+ /, "").replace(/ : \w+$/, "");
  if (!card) return "";
  const times = Object.entries(MEASURED).find(([name]) => card.includes(name))?.[1];
  return times
    ? `Measured on ${card}: ${times} times as fast.`
    : `Not measured on ${card} yet: after a run the node shows what a step takes.`;
}
