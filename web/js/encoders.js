// Where WanCore Accelerate VAE belongs in a graph: behind a Wan VAE, for the nodes Wan... that encode pictures with it
// for a sampler. Nothing here changes the graph or asks the page.
import { Place, gives, isOn, maker, namesWan, titleOf, wireFrom } from "./models.js";

export const ACCELERATE_VAE = "WanCoreAccelerateVAE";
const encodes = (node, slot) =>
  /^Wan[A-Z0-9]/.test(node.type) && gives(node, "CONDITIONING") && node.inputs[slot].type === "VAE";

// What a click would do: [{ graph, node, slot, ends }], as `plan` of models.js has them.
export function encoders(root) {
  const wires = [];
  for (const place of new Place(root).all()) {
    for (const node of place.on ? place.graph.nodes.filter(isOn) : []) {
      for (const slot of (node.inputs ?? []).keys()) {
        const origin = encodes(node, slot) && place.origin(node, slot), vae = origin && maker(origin);
        if (!vae || [origin, vae].some((at) => at.node.type === ACCELERATE_VAE)) continue;
        if (!vae.place.texts(vae.node).some(namesWan)) continue;
        if (!wires.some((one) => one.node === origin.node && one.slot === origin.slot)) {
          wires.push(wireFrom(origin, encodes));
        }
      }
    }
  }
  return wires.filter((wire) => wire.ends.length);
}

// One line of what a click did.
export function encoded(wires) {
  const titles = wires.map(({ node }) => titleOf(node)).join(", ");
  return wires.length ? `WanCore Accelerate VAE is behind ${titles}: equal frames are encoded once.` : "";
}
