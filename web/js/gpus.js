// Where WanCore Sampler on all GPUs belongs in a graph: in the place of a KSampler, or of two KSampler (Advanced) of
// which one goes on where the other ends, with the two experts of Wan 2.2. Nothing here changes the graph or asks the
// page. The samplers stay in the graph, muted, so that the way back needs nothing but the graph.
import { ACCELERATE, NEVER, Place, is, isOn, isSampler, linkInto, linksFrom, refusal, titleOf, trace } from "./models.js";
import { linkTo } from "./videos.js";

export const SAMPLER = "WanCoreSampler";
const SOLVERS = ["euler", "heun", "res_multistep"]; // of which both make the same
const OF_TWO = SOLVERS.slice(0, 1); // where a second sampler begins anew
const LAST = 10_000; // the step at which KSampler (Advanced) ends by default: after every schedule
export const valueOf = (node, name) => (node.widgets ?? []).find((one) => one.name === name)?.value;

const sameEnd = (one, other) => is(one?.origin_id, other?.origin_id) && one?.origin_slot === other?.origin_slot;

// Whether two inputs get the same: from one output, or as equal values.
export function same(graph, node, name, other, otherName = name) {
  const [link, otherLink] = [linkTo(graph, node, name), linkTo(graph, other, otherName)];
  return sameEnd(link, otherLink) && (link !== null || valueOf(node, name) === valueOf(other, otherName));
}

// The sampler whose leftover noise another one goes on with; null: it begins.
function before(graph, node) {
  const link = linkTo(graph, node, "latent_image"), first = link && graph.getNodeById(link.origin_id);
  return first?.type === "KSamplerAdvanced" && isOn(first) ? first : null;
}

// How many steps there may be: any number where another node says it.
const mostSteps = (graph, node) => (linkTo(graph, node, "steps") ? LAST : valueOf(node, "steps"));

// Why WanCore Sampler cannot do what these samplers do together; null: it can.
function unfit(graph, first, last) {
  const said = (node, name, value) => linkTo(graph, node, name) === null && valueOf(node, name) === value;
  const able = first === last ? SOLVERS : OF_TWO, solver = valueOf(first, "sampler_name");
  if (linkTo(graph, first, "sampler_name")) return "another node says its sampler";
  if (!able.includes(solver)) return `with ${solver} the video would be another; it takes ${able.join(", ")}`;
  if ([first, last].some((one) => said(one, "cfg", 0))) return "its cfg is 0"; // there the model's own
  if (last.type === "KSampler") return said(last, "denoise", 1) ? null : "it starts from a video";
  if (!said(first, "add_noise", "enable") || !said(last, "return_with_leftover_noise", "disable")) {
    return "it is a part of a run whose other part is not known";
  }
  const toTheEnd =
    same(graph, last, "end_at_step", last, "steps") ||
    (linkTo(graph, last, "end_at_step") === null && valueOf(last, "end_at_step") >= mostSteps(graph, last));
  if (!said(first, "start_at_step", 0) || !toTheEnd) return "it leaves steps out";
  if (first === last) return null;
  if (said(first, "end_at_step", 0)) return `${titleOf(first)} has no step`;
  const goesOn =
    said(first, "return_with_leftover_noise", "enable") && said(last, "add_noise", "disable") &&
    same(graph, first, "end_at_step", last, "start_at_step") && linksFrom(graph, first, 0).length === 1;
  if (!goesOn) return `it does not go on where ${titleOf(first)} ends`;
  const other = ["steps", "sampler_name", "scheduler", "positive", "negative"].find((one) => !same(graph, first, one, last));
  return other ? `its ${other} is another than that of ${titleOf(first)}` : null;
}

// WanCore Accelerate before a sampler; null: there is none.
export function accelerateBefore(graph, node) {
  const source = graph.getNodeById(linkTo(graph, node, "model")?.origin_id);
  return source?.type === ACCELERATE ? source : null;
}

// The link that brings a sampler its model, from before WanCore Accelerate.
const modelLink = (graph, node) => linkTo(graph, accelerateBefore(graph, node) ?? node, "model");

// The links of the models that two samplers run: one where both run the same in the same way, or where there is one.
function modelsOf(graph, first, last) {
  const links = [first, last].map((one) => modelLink(graph, one));
  return sameEnd(...links) && same(graph, first, "cfg", last) ? links.slice(0, 1) : links;
}

// What the command would do: { runs: [{ graph, first, last, models }], refused: why it does nothing }. models: links, of
// both experts or of the one. Either every sampler of a Wan model is replaced or none is.
export function onAllGpus(root) {
  const runs = new Map(), refused = new Set();
  for (const place of new Place(root).all()) {
    const { graph } = place;
    for (const last of place.on ? graph.nodes : []) {
      if (!isSampler(last) || !isOn(last)) continue;
      const traced = trace(place.origin(last, (last.inputs ?? []).findIndex((one) => one.type === "MODEL")));
      if (!traced.accelerated && refusal(traced, place, last)) continue; // another model's
      if (last.type !== "KSampler" && last.type !== "KSamplerAdvanced") {
        refused.add(`${titleOf(last)} is no sampler that WanCore Sampler stands in for`);
        continue;
      }
      const users = linksFrom(graph, last, 0).map((link) => graph.getNodeById(link.target_id));
      if (users.length === 1 && users[0]?.type === "KSamplerAdvanced" && isOn(users[0])) continue; // the first of two
      const first = before(graph, last) ?? last, why = unfit(graph, first, last);
      if (why) refused.add(`${titleOf(last)}: ${why}`);
      runs.set(last, { graph, first, last, models: modelsOf(graph, first, last) });
    }
  }
  if (new Set([...runs.values()].map((run) => run.graph)).size > 1) refused.add("its samplers are in several subgraphs");
  if (!runs.size && !refused.size) refused.add("no Wan model was found on its way to a KSampler");
  return { runs: refused.size ? [] : [...runs.values()], refused: [...refused] };
}

// What is in the place of muted samplers: a WanCore Sampler of a launcher, with the samplers that have the same prompts
// and latents. { first, last, added: the nodes that came with it }; null: it is in nobody's place.
export function samplersOf(graph, node) {
  const source = (one, name) => graph.getNodeById(linkTo(graph, one, name)?.origin_id);
  const from = source(node, "model"), launcher = from?.type === "WanCoreFromModel" ? source(from, "workers") : null;
  const sigmas = source(node, "sigmas");
  if (!launcher || sigmas?.type !== "BasicScheduler") return null;
  for (const last of graph.nodes.filter((one) => /^KSampler/.test(one.type) && one.mode === NEVER)) {
    const earlier = source(last, "latent_image");
    const first = earlier?.type === "KSamplerAdvanced" && earlier.mode === NEVER ? earlier : last;
    const prompts = ["positive", "negative"].every((name) => same(graph, last, name, node));
    const begins = same(graph, first, "latent_image", node, "latent");
    if (prompts && begins && !linksFrom(graph, last, 0).length) return { first, last, added: [node, from, sigmas, launcher] };
  }
  return null;
}
