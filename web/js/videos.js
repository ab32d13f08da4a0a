// Where WanCore Decode to Video belongs in a graph: in the place of VAE Decode and Create Video, where a Wan VAE's frames
// go to that Create Video alone and its video to Save Video alone. Nothing here changes the graph or asks the page.
//
// The pair stays in the graph, muted: to take WanCore Decode to Video out again needs nothing but the graph.
import {
  INSIDE, NEVER, OUTSIDE, Place, before, is, isOn, linkInto, linksFrom, maker, mayGiveWan, namesWan, past, titleOf,
} from "./models.js";

export const TO_VIDEO = "WanCoreDecodeToVideo";
const COPIED = ["auto", "mp4", "h264"]; // choices of Save Video with which it stores a stream as it is

export function linkTo(graph, node, name) {
  return linkInto(graph, node, (node.inputs ?? []).findIndex((input) => input.name === name));
}

// The nodes that links lead to, out of subgraphs and into them.
function targets(place, links) {
  return past(place.graph, links).flatMap(({ target_id, target_slot }) => {
    if (Number(target_id) === OUTSIDE) {
      return place.outer ? targets(place.outer, linksFrom(place.outer.graph, place.node, target_slot)) : [];
    }
    const target = place.graph.getNodeById(target_id), inner = place.inner.get(target);
    return inner ? targets(inner, linksFrom(inner.graph, { id: INSIDE }, target_slot)) : [{ place, node: target }];
  });
}

// The VAE Decode that a Create Video has its frames from; null: they come from elsewhere.
function decoderOf(graph, create) {
  const link = before(graph, linkTo(graph, create, "images")), node = link && graph.getNodeById(link.origin_id);
  return node?.type === "VAEDecode" ? node : null;
}

const copies = ({ place, node }) =>
  node.type === "SaveVideo" && !linksFrom(place.graph, node, 0).length &&
  (node.widgets ?? []).every(({ name, value }) => name === "filename_prefix" || !value || COPIED.includes(value));

// Why a Create Video with a VAE Decode stays; null: WanCore Decode to Video does what both do.
function refusal(place, decode, create) {
  const values = Object.fromEntries((create.widgets ?? []).map(({ name, value }) => [name, value]));
  const shown = (place.node?.properties?.proxyWidgets ?? []).some(([id, name]) => is(id, create.id) && name === "fps");
  const uses = targets(place, linksFrom(place.graph, create, 0));
  if (past(place.graph, linksFrom(place.graph, decode, 0)).length > 1) return "its frames go to other nodes too";
  if ((values.bit_depth ?? 8) !== 8) return `its video has ${values.bit_depth} bits`;
  if (shown) return `its fps is set on ${titleOf(place.node)}`;
  if (!uses.length) return "no Save Video takes its video";
  return uses.every(copies) ? null : "its video goes to a node that does not store it as it is";
}

// Why a Create Video without such a VAE Decode stays; null: its frames are no Wan VAE's.
function elsewhere(place, create) {
  const at = maker(place.begin(linkTo(place.graph, create, "images")));
  const vae = /^VAEDecode(Tiled)?$/.test(at?.node.type) && maker(at.place.begin(linkTo(at.place.graph, at.node, "vae")));
  if (!vae?.place?.texts(vae.node).some(namesWan)) return null;
  return at.node.type === "VAEDecode" ? "its frames do not come straight from VAE Decode" : `${titleOf(at.node)} gives its frames`;
}

// What a click would do: { pairs: [{ graph, decode, create }], left: why others stay }.
export function videos(root) {
  const pairs = new Map(), left = new Set(), refused = new Set();
  for (const place of new Place(root).all()) {
    for (const create of place.on ? place.graph.nodes : []) {
      if (create.type !== "CreateVideo" || !isOn(create)) continue;
      const decode = decoderOf(place.graph, create);
      if (!decode || !isOn(decode)) {
        const why = elsewhere(place, create);
        if (why) left.add(`${titleOf(create)}: ${why}`);
        continue;
      }
      const vae = maker(place.begin(linkTo(place.graph, decode, "vae")));
      const unknown = vae && mayGiveWan(vae) ? `which VAE ${titleOf(vae.node)} gives is not known` : "";
      const why = vae?.place.texts(vae.node).some(namesWan) ? refusal(place, decode, create) : unknown;
      if (why) left.add(`${titleOf(create)}: ${why}`);
      if (why !== null) refused.add(create);
      else pairs.set(create, { graph: place.graph, decode, create });
    }
  }
  return { pairs: [...pairs.values()].filter(({ create }) => !refused.has(create)), left: [...left] };
}

// The muted pair in whose place a WanCore Decode to Video is: they have the same latents and the same VAE. null: none.
export function replaced(graph, node) {
  const same = (one, other) => one && other && is(one.origin_id, other.origin_id) && one.origin_slot === other.origin_slot;
  for (const create of graph.nodes.filter((one) => one.type === "CreateVideo" && one.mode === NEVER)) {
    const decode = decoderOf(graph, create);
    const pairs = decode?.mode === NEVER ? [["samples", "latent"], ["vae", "vae"]] : [];
    const links = pairs.map(([one, other]) => [linkTo(graph, decode, one), linkTo(graph, node, other)]);
    if (links.length && links.every((pair) => same(...pair))) return { decode, create };
  }
  return null;
}

// One line of what a click did.
export function streamed({ pairs, left }) {
  const both = pairs.length > 1 ? `${pairs.length} pairs of VAE Decode and Create Video` : "VAE Decode and Create Video";
  const done = pairs.length ? [`WanCore Decode to Video is in the place of ${both} (muted): it encodes while it decodes.`] : [];
  return [...done, ...(left.length ? [`Left: ${left.join("; ")}.`] : [])].join(" ");
}
