// Where WanCore Accelerate VAE belongs in a graph: behind a Wan VAE of ComfyUI's loader, for the nodes Wan... that encode
// pictures with it for a sampler. Nothing here changes the graph or asks the page.
import { ACCELERATE_VAE, Place, gives, isOn, mayGiveWan, namesWan, titleOf, way, wireFrom } from "./models.js";

const encodes = (node, slot) =>
  /^Wan[A-Z0-9]/.test(node.type) && gives(node, "CONDITIONING") && node.inputs[slot].type === "VAE";

// What a click would do: { wires: [{ graph, node, slot, ends }], as `plan` of models.js has them, left: why others stay }.
export function encoders(root) {
  const wires = [], left = new Set();
  for (const place of new Place(root).all()) {
    for (const node of place.on ? place.graph.nodes.filter(isOn) : []) {
      for (const slot of (node.inputs ?? []).keys()) {
        const origin = encodes(node, slot) && place.origin(node, slot), nodes = way(origin), vae = nodes.at(-1);
        if (!vae || vae.node.type.startsWith("WanCore")) continue;
        const there = nodes.find((at) => at.node.type === ACCELERATE_VAE)?.node;
        if (!vae.place.texts(vae.node).some(namesWan)) {
          const how = `which VAE ${titleOf(vae.node)} gives is not known: connect WanCore Accelerate VAE behind it by hand`;
          if (!there && mayGiveWan(vae)) left.add(how);
        } else if (there) {
          if (!isOn(there)) left.add(`${titleOf(there)} is there and bypassed`);
        } else if (!wires.some((one) => one.node === origin.node && one.slot === origin.slot)) {
          wires.push(wireFrom(origin, encodes));
        }
      }
    }
  }
  return { wires: wires.filter((wire) => wire.ends.length), left: [...left] };
}

// One line of what a click did.
export function encoded({ wires, left }) {
  const titles = [...new Set(wires.map(({ node }) => titleOf(node)))].join(", ");
  const done = wires.length ? [`WanCore Accelerate VAE is behind ${titles}: equal frames are encoded once.`] : [];
  return [...done, ...(left.length ? [`Left: ${left.join("; ")}.`] : [])].join(" ");
}
