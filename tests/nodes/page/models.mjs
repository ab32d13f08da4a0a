// web/js/models.js on small graphs. Run by test_page_script.py.
import assert from "node:assert/strict";
import test from "node:test";
import { encoded, encoders } from "./extensions/wancore/js/encoders.js";
import { onAllGpus, samplersOf } from "./extensions/wancore/js/gpus.js";
import { accelerated, freePlace, graphsOf, measured, plan, visible } from "./extensions/wancore/js/models.js";
import { replaced, streamed, videos } from "./extensions/wancore/js/videos.js";

// A graph of [id, type, inputs, outputs, more]. inputs: name -> [node, slot, type], or a type alone for a loose one.
// outputs: types. more: texts of widgets, mode, a subgraph. ends: [node, slot] of what leaves a subgraph.
function graph(entries, inputs = [], ends = []) {
  const links = new Map();
  const warned = (name) => ({ get: () => assert.fail(`newer pages warn of ${name}`) });
  const slot = (one) => Object.defineProperties(one, { link: warned("input.link"), links: warned("output.links") });
  const nodes = entries.map(([id, type, from, outputs, { texts = [], values = {}, ...more } = {}]) => ({
    id, type, title: `${type} ${id}`, mode: 0, pos: [id * 400, 0], size: [300, 200], ...more,
    widgets: Object.entries({ ...Object.fromEntries(texts.map((value, n) => [`w${n}`, value])), ...values }).map(([name, value]) => ({ name, value })),
    inputs: Object.entries(from).map(([name, one]) => slot({ name, type: typeof one === "string" ? one : one[2] })),
    outputs: outputs.map((kind) => slot({ type: kind })),
  }));
  const made = {
    nodes,
    inputs: inputs.map((name) => ({ name, linkIds: [] })),
    outputs: [],
    getNodeById: (id) => nodes.find((node) => node.id === id) ?? null,
    getLink: (id) => links.get(id),
    get links() {
      return Object.fromEntries(links);
    },
  };
  const link = (origin_id, origin_slot, target_id, target_slot) => {
    const id = links.size + 1;
    links.set(id, { id, origin_id, origin_slot, target_id, target_slot });
    return id;
  };
  entries.forEach(([id, , from], at) => {
    Object.values(from).forEach((one, slot) => {
      if (typeof one === "string") return;
      const number = link(one[0], one[1], id, slot);
      const input = nodes[at].inputs[slot];
      if (one[3]) input.widget = { name: one[3] };
      if (one[0] === -10) made.inputs[one[1]].linkIds.push(number);
    });
  });
  made.outputs = ends.map(([node, slot], at) => ({ linkIds: [link(node, slot, -20, at)] }));
  return made;
}

const loader = (id, file, more = {}) => [id, "UNETLoader", {}, ["MODEL"], { texts: [file, "default"], ...more }];
const through = (id, type, from, more = {}) => [id, type, { model: [...from, "MODEL"] }, ["MODEL"], more];
const sampler = (id, from, more = {}, type = "KSampler") => [id, type, { model: [...from, "MODEL"] }, ["LATENT"], more];
const wires = (found) => found.wires.map((wire) => [wire.node.id, wire.slot, wire.ends.map(([node]) => node.id)]);
const UNKNOWN = "is not known to be a Wan model: if it is one, connect WanCore Accelerate in front of the sampler by " +
  'hand, or put "wan" into the file\'s name';
const HIGH = "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors";

test("files are known by their names, and no others are", () => {
  const known = [HIGH, "Wan2_1-I2V-14B-480p_fp8_e4m3fn_scaled_KJ.safetensors", "wan_animate_2_int8_convrot.safetensors",
    "Wan21-WanMove_fp8.safetensors", "sub/FastWan2.2-TI2V-5B.gguf", "WanVideo_2_1.safetensors", "WanT2V.gguf",
    "Phantom-Wan-14B.safetensors", "SCAIL_2_fp16.safetensors", "wan\\low.safetensors"];
  const others = ["flux1-dev.safetensors", "swan_lake.safetensors", "taiwan.safetensors", "wander.safetensors",
    "qwen_image.safetensors", "ltxv-13b.safetensors", "sam3.1_multiplex_fp16.safetensors", "wanted.safetensors"];
  const of = (file) => plan(graph([loader(1, file), sampler(2, [1, 0])]));
  for (const file of known) assert.equal(of(file).wires.length, 1, file);
  for (const file of others) {
    assert.deepEqual([of(file).wires, of(file).left], [[], [`KSampler 2: ${file} ${UNKNOWN}`]]);
  }
});

test("the wire is taken just before the sampler; schedulers and other users of it are left as they are", () => {
  const found = plan(graph([
    loader(1, HIGH),
    through(2, "LoraLoaderModelOnly", [1, 0]),
    through(3, "ModelSamplingSD3", [2, 0]),
    sampler(4, [3, 0]),
    [5, "BasicScheduler", { model: [3, 0, "MODEL"] }, ["SIGMAS"]],
    [6, "ModelSave", { model: [3, 0, "MODEL"] }, []],
  ]));
  assert.deepEqual(wires(found), [[3, 0, [4]]]);
  assert.equal(accelerated(found),
    "1 node added, before 1 sampler. The video stays the same but for rounding; Ctrl+Z takes it back.");
});

test("one node for each wire: two experts, of which one has two samplers, and a guider", () => {
  const found = plan(graph([
    loader(1, HIGH),
    loader(2, "wan2.2_i2v_low_noise_14B.safetensors"),
    sampler(3, [1, 0], {}, "KSamplerAdvanced"),
    sampler(4, [1, 0], {}, "KSamplerAdvanced"),
    sampler(5, [2, 0], {}, "KSamplerAdvanced"),
    [6, "CFGGuider", { model: [2, 0, "MODEL"] }, ["GUIDER"]],
    [7, "SamplerCustomAdvanced", { guider: [6, 0, "GUIDER"] }, ["LATENT"]],
  ]));
  assert.deepEqual(wires(found), [[1, 0, [3, 4]], [2, 0, [5, 6]]]);
  assert.match(accelerated(found), /^2 nodes added, before 4 samplers\./);
});

test("nothing is put on a wire that has it, however far before; a bypassed one is named", () => {
  const nodes = [loader(1, HIGH), through(2, "WanCoreAccelerate", [1, 0]), through(3, "LoraLoader", [2, 0]), sampler(4, [3, 0])];
  const found = plan(graph(nodes));
  assert.deepEqual([found.wires, found.left, found.there], [[], [], 1]);
  assert.equal(accelerated(found), "Nothing to add: it is there already.");
  nodes[1] = through(2, "WanCoreAccelerate", [1, 0], { mode: 4 });
  nodes[3] = sampler(4, [2, 0]);
  assert.deepEqual(plan(graph(nodes)).left, ["WanCoreAccelerate 2 is there and bypassed"]);
});

test("WanCore's own sampler needs nothing, in a subgraph too", () => {
  const inside = graph([[1, "WanCoreSampler", { model: "WANCORE_MODEL" }, ["LATENT"]]]);
  const boxed = (mode) => accelerated(plan(graph([[2, "box", {}, ["LATENT"], { mode, subgraph: inside }]])));
  assert.equal(boxed(0), "Nothing to add: WanCore Sampler has all of it.");
  assert.equal(boxed(2), "Nothing to add: no Wan model was found on its way to a sampler.");
});

test("switches, merges and nodes that are not known: every model that may come must be Wan's", () => {
  const switched = (file) => plan(graph([
    loader(1, HIGH),
    loader(2, file),
    [3, "ComfySwitchNode", { on_false: [1, 0, "*"], on_true: [2, 0, "*"] }, ["*"]],
    sampler(4, [3, 0]),
  ]));
  assert.deepEqual(wires(switched("wan2.1.safetensors")), [[3, 0, [4]]]);
  assert.deepEqual(switched("sdxl.safetensors").left, [`KSampler 4: sdxl.safetensors ${UNKNOWN}`]);
});

test("a file without the name: a LoRA on the wire, Wan's own nodes or its text encoder in front of the sampler say it", () => {
  const file = "smooth_mix_high.safetensors";
  const conditioned = (entries, type = "CONDITIONING") => plan(graph([
    loader(1, file), ...entries, [9, "KSampler", { model: [1, 0, "MODEL"], positive: [8, 0, type] }, ["LATENT"]],
  ])).wires.length;
  const lora = through(2, "LoraLoaderModelOnly", [1, 0], { texts: ["wan2.2_lightx2v.safetensors"] });
  assert.equal(plan(graph([loader(1, file), lora, sampler(3, [2, 0])])).wires.length, 1);
  assert.equal(conditioned([[8, "WanImageToVideo", {}, ["CONDITIONING"]]]), 1);
  const encode = [8, "CLIPTextEncode", { clip: [7, 0, "CLIP"] }, ["CONDITIONING"]];
  assert.equal(conditioned([[7, "CLIPLoader", {}, ["CLIP"], { texts: ["umt5.safetensors", "wan"] }], encode]), 1);
  assert.equal(conditioned([[7, "CLIPLoader", {}, ["CLIP"], { texts: ["t5.safetensors", "sd3"] }], encode]), 0);
  // The latents of a Wan sampler, and pictures of one, go to other models too.
  const wan = [6, "WanImageToVideo", {}, ["CONDITIONING"]];
  const first = [7, "KSampler", { model: "MODEL", positive: [6, 0, "CONDITIONING"] }, ["LATENT"]];
  assert.equal(conditioned([wan, first, [8, "LatentUpscale", { samples: [7, 0, "LATENT"] }, ["LATENT"]]], "LATENT"), 0);
});

test("what is off is left: samplers, loaders, subgraphs", () => {
  const found = plan(graph([
    loader(1, HIGH), sampler(2, [1, 0], { mode: 4 }), sampler(3, [1, 0], { mode: 2 }),
    [4, "sub", { model: [1, 0, "MODEL"] }, ["LATENT"], {
      mode: 4, subgraph: graph([sampler(5, [-10, 0])], ["model"], [[5, 0]]),
    }],
    loader(6, HIGH, { mode: 2 }), sampler(7, [6, 0]), [8, "KSampler", { model: "MODEL" }, ["LATENT"]],
  ]));
  assert.deepEqual([found.wires, found.off], [[], 3]);
  assert.deepEqual(found.left, ["KSampler 7: no model is connected", "KSampler 8: no model is connected"]);
  assert.match(accelerated(found), /^Nothing to add: no Wan model .*; 3 samplers that are muted or bypassed\.$/);
});

test("a bypassed node hands on its model; SetNode and GetNode are one wire", () => {
  const found = plan(graph([
    loader(1, HIGH),
    through(2, "LoraLoader", [1, 0], { mode: 4 }),
    through(3, "SetNode", [2, 0], { texts: ["high"] }),
    [4, "GetNode", {}, ["MODEL"], { texts: ["high"] }],
    sampler(5, [4, 0]),
  ]));
  assert.deepEqual(wires(found), [[4, 0, [5]]]);
});

test("a GetNode sees what SetNode has in the graph around its subgraph; a SetNode beside it comes first", () => {
  const get = [41, "GetNode", {}, ["MODEL"], { texts: ["high"] }];
  const own = [loader(43, "flux.safetensors"), through(44, "SetNode", [43, 0], { texts: ["high"] })];
  const around = (inner) => graph([
    loader(1, HIGH), through(3, "SetNode", [1, 0], { texts: ["high"] }), [4, "sub", {}, ["LATENT"], { subgraph: inner }],
  ]);
  assert.deepEqual(wires(plan(around(graph([get, sampler(42, [41, 0])])))), [[41, 0, [42]]]);
  assert.match(plan(around(graph([get, sampler(42, [41, 0]), ...own]))).left[0], /flux.safetensors is not known/);
});

test("into subgraphs and out of them: the node stands where the wire begins", () => {
  const load = graph([loader(11, "?", {})], ["unet_name"], [[11, 0]]);
  load.nodes[0].inputs.push({ name: "w0", type: "COMBO", widget: { name: "w0" } });
  const inner = graph([sampler(21, [-10, 0]), through(22, "LoraLoader", [-10, 0])], ["model"], [[21, 0]]);
  const outer = graph([[31, "sub", { model: [-10, 0, "MODEL"] }, ["LATENT"], { subgraph: inner }]], ["model"], [[31, 0]]);
  const root = graph([
    [1, "load", { unet_name: "COMBO" }, ["MODEL"], { subgraph: load }],
    [2, "sub", { model: [1, 0, "MODEL"] }, ["LATENT"], { subgraph: outer }],
    sampler(3, [1, 0]),
  ]);
  assert.deepEqual(plan(root).left.length, 2); // the file is not known
  // its name is the subgraph's own widget
  const named = { id: 99, origin_id: -10, origin_slot: 0, target_id: 11, target_slot: 0 };
  Object.defineProperty(load, "links", { value: { ...load.links, 99: named } });
  root.nodes[0].widgets = [{ name: "unet_name", value: HIGH }];
  const found = plan(root);
  assert.deepEqual([wires(found), found.left], [[[1, 0, [2, 3]]], []]);
  assert.deepEqual(found.wires[0].samplers.map((node) => node.id), [3, 21]);
  assert.equal(found.wires[0].graph, root);
  assert.equal(graphsOf(root).length, 4);
  assert.deepEqual([visible(root, root, inner.nodes[0]).id, visible(root, inner, inner.nodes[0]).id], [2, 21]);
  assert.equal(visible(root, load, inner.nodes[0]), null);
});

test("a subgraph that is used twice is counted once, and its wires are Wan's only if both uses are", () => {
  const both = (file) => {
    const shared = graph([through(11, "ModelSamplingSD3", [-10, 0]), sampler(12, [11, 0])], ["model"], [[12, 0]]);
    return plan(graph([
      loader(1, HIGH), loader(2, file),
      [3, "sub", { model: [1, 0, "MODEL"] }, ["LATENT"], { subgraph: shared }],
      [4, "sub", { model: [2, 0, "MODEL"] }, ["LATENT"], { subgraph: shared }],
    ]));
  };
  assert.deepEqual(wires(both(HIGH)), [[11, 0, [12]]]);
  assert.match(accelerated(both(HIGH)), /^1 node added in sub 3, before 1 sampler\./);
  assert.deepEqual(wires(both("flux.safetensors")), []);
});

test("what other packs do with a Wan model is left and named", () => {
  const found = plan(graph([
    loader(1, HIGH), loader(2, "sam3.safetensors"),
    [3, "UltimateSDUpscale", { model: [1, 0, "MODEL"] }, ["IMAGE"]],
    [4, "SAM3_Detect", { model: [2, 0, "MODEL"] }, ["MASK"]],
    [5, "WanVideoSampler", { model: "WANVIDEOMODEL" }, ["LATENT"]],
    [6, "WanCoreFromModel", { model: [1, 0, "MODEL"] }, ["WANCORE_MODEL"]],
  ]));
  const known = "is no sampler that is known here";
  assert.deepEqual([found.wires, found.left], [[], [`UltimateSDUpscale 3 ${known}`, `WanVideoSampler 5 ${known}`]]);
});

test("a graph with loops ends", () => {
  const nodes = [
    loader(1, HIGH),
    [2, "forLoopStart", { a: [1, 0, "*"], flow: [3, 0, "*"] }, ["*", "*"]],
    [3, "Any Switch", { one: [2, 0, "*"], two: [3, 0, "*"] }, ["MODEL"]],
    sampler(4, [3, 0]),
    through(5, "LoraLoader", [6, 0], { mode: 4 }), through(6, "LoraLoader", [5, 0], { mode: 4 }), sampler(7, [5, 0]),
  ];
  const found = plan(graph(nodes));
  assert.deepEqual(wires(found), [[3, 0, [4]]]);
  assert.deepEqual(found.left, ["KSampler 7: no model is connected"]);
});

test("an added node covers no other", () => {
  const box = (x, y) => ({ pos: [x, y], size: [300, 200] });
  assert.deepEqual(freePlace([box(400, 0)], box(400, 0), [300, 200]), [60, 0]);
  const [x, y] = freePlace([box(400, 0), box(60, 0), box(60, -300)], box(400, 0), [300, 200]);
  assert.ok(y >= 270 || x <= -280, `${x}, ${y}`);
});

// A Wan VAE, VAE Decode, Create Video and Save Video. changed: entries by id in the place of these.
function decoding(changed = {}, more = []) {
  const entries = {
    1: [1, "VAELoader", {}, ["VAE"], { texts: ["wan_2.1_vae.safetensors"] }],
    2: [2, "KSampler", { model: "MODEL" }, ["LATENT"]],
    3: [3, "VAEDecode", { samples: [2, 0, "LATENT"], vae: [1, 0, "VAE"] }, ["IMAGE"]],
    4: [4, "CreateVideo", { images: [3, 0, "IMAGE"], audio: "AUDIO" }, ["VIDEO"], { values: { fps: 16, bit_depth: 8 } }],
    5: [5, "SaveVideo", { video: [4, 0, "VIDEO"] }, ["VIDEO"], { values: { filename_prefix: "a", format: "auto", codec: "h264" } }],
  };
  return graph([...Object.values({ ...entries, ...changed }).filter(Boolean), ...more]);
}
const saved = (values) => ({ 5: [5, "SaveVideo", { video: [4, 0, "VIDEO"] }, ["VIDEO"], { values }] });
const pairs = (found) => found.pairs.map(({ decode, create }) => [decode.id, create.id]);

test("decoding and encoding are one node where a Wan VAE's frames go to a Create Video and its video to Save Video", () => {
  const found = videos(decoding());
  assert.deepEqual([pairs(found), found.left], [[[3, 4]], []]);
  assert.match(streamed(found), /^WanCore Decode to Video is in the place of VAE Decode and Create Video \(muted\)/);
  assert.match(streamed({ pairs: [1, 2], left: [] }), /in the place of 2 pairs of VAE Decode and Create Video \(muted\)/);
});

test("other VAEs, pairs that are off and frames that pass through other nodes stay, without a word", () => {
  const off = { 4: [4, "CreateVideo", { images: [3, 0, "IMAGE"] }, ["VIDEO"], { mode: 4 }] };
  const between = { 4: [4, "CreateVideo", { images: [6, 0, "IMAGE"] }, ["VIDEO"]] };
  const graphs = [
    decoding({ 1: [1, "VAELoader", {}, ["VAE"], { texts: ["qwen_image_vae.safetensors"] }] }), decoding(off),
    decoding(between, [[6, "ImageScale", { image: [3, 0, "IMAGE"] }, ["IMAGE"]]]),
  ];
  for (const one of graphs) assert.deepEqual(videos(one), { pairs: [], left: [] });
});

const reroute = (id, from, type) => [id, "Reroute", { "": [from, 0, "*"] }, [type]];
test("reroute nodes before and behind Create Video change nothing, and what goes off at one is seen", () => {
  const by = {
    4: [4, "CreateVideo", { images: [6, 0, "IMAGE"] }, ["VIDEO"]],
    5: [5, "SaveVideo", { video: [8, 0, "VIDEO"] }, []],
  };
  const through = [reroute(6, 7, "IMAGE"), reroute(7, 3, "IMAGE"), reroute(8, 4, "VIDEO")];
  assert.deepEqual(videos(decoding(by, through)).left, []);
  assert.deepEqual(pairs(videos(decoding(by, through))), [[3, 4]]);
  const preview = [9, "PreviewImage", { images: [7, 0, "IMAGE"] }, []];
  assert.deepEqual(videos(decoding(by, [...through, preview])).left, ["CreateVideo 4: its frames go to other nodes too"]);
});

test("a pair in two graphs and VAE Decode (Tiled) are left, and the message says so", () => {
  const tiled = { 3: [3, "VAEDecodeTiled", { samples: [2, 0, "LATENT"], vae: [1, 0, "VAE"] }, ["IMAGE"]] };
  assert.deepEqual(videos(decoding(tiled)), { pairs: [], left: ["CreateVideo 4: VAEDecodeTiled 3 gives its frames"] });
  const inner = graph([[31, "VAEDecode", { samples: "LATENT", vae: [-10, 0, "VAE"] }, ["IMAGE"]]], ["vae"], [[31, 0]]);
  const box = { 3: [3, "sub", { vae: [1, 0, "VAE"] }, ["IMAGE"], { subgraph: inner }] };
  assert.deepEqual(videos(decoding(box)).left, ["CreateVideo 4: its frames do not come straight from VAE Decode"]);
});

test("frames and videos that other nodes take are made as before, and the message says why", () => {
  const reasons = (changed, more) => {
    const found = videos(decoding(changed, more));
    assert.deepEqual(found.pairs, []);
    return streamed(found);
  };
  assert.match(reasons({}, [[6, "PreviewImage", { images: [3, 0, "IMAGE"] }, []]]), /CreateVideo 4: its frames go to other/);
  const stored = /its video goes to a node that does not store it as it is/;
  assert.match(reasons(saved({ filename_prefix: "a", format: "webm", codec: "auto" })), stored);
  assert.match(reasons(saved({ filename_prefix: "a", format: "auto", encoding: "re-encode" })), stored);
  assert.match(reasons({}, [[6, "GetVideoComponents", { video: [4, 0, "VIDEO"] }, ["IMAGE"]]]), stored);
  assert.match(reasons({}, [[6, "GetVideoComponents", { video: [5, 0, "VIDEO"] }, ["IMAGE"]]]), stored);
  assert.match(reasons({ 5: null }), /no Save Video takes its video/);
  const ten = { 4: [4, "CreateVideo", { images: [3, 0, "IMAGE"] }, ["VIDEO"], { values: { bit_depth: 10 } }] };
  assert.match(reasons(ten), /its video has 10 bits/);
});

test("Save Video may be outside of the subgraph; every use of a subgraph must be one that it can do", () => {
  const used = (second, more = {}) => {
    const inner = decoding({ 5: null });
    inner.outputs = [{ linkIds: [9] }];
    const links = { ...inner.links, 9: { id: 9, origin_id: 4, origin_slot: 0, target_id: -20, target_slot: 0 } };
    Object.defineProperty(inner, "links", { value: links });
    return videos(graph([
      [7, "sub", {}, ["VIDEO"], { subgraph: inner, ...more }], [8, "sub", {}, ["VIDEO"], { subgraph: inner }],
      [9, "SaveVideo", { video: [7, 0, "VIDEO"] }, []], [10, second, { video: [8, 0, "VIDEO"] }, []],
    ]));
  };
  assert.deepEqual(pairs(used("SaveVideo")), [[3, 4]]);
  assert.deepEqual(pairs(used("GetVideoComponents")), []);
  assert.match(used("SaveVideo", { properties: { proxyWidgets: [["4", "fps"]] } }).left[0], /its fps is set on sub 7/);
});

test("the pair in whose place a node is, is known by its latents and its VAE", () => {
  const off = { mode: 2 };
  const muted = {
    3: [3, "VAEDecode", { samples: [2, 0, "LATENT"], vae: [1, 0, "VAE"] }, ["IMAGE"], off],
    4: [4, "CreateVideo", { images: [3, 0, "IMAGE"] }, ["VIDEO"], off],
  };
  const node = (latent) => [6, "WanCoreDecodeToVideo", { vae: [1, 0, "VAE"], latent: [latent, 0, "LATENT"] }, ["VIDEO"]];
  const of = (changed, latent) => {
    const made = decoding(changed, [node(latent), [7, "KSampler", { model: "MODEL" }, ["LATENT"]]]);
    return replaced(made, made.getNodeById(6));
  };
  assert.deepEqual([of(muted, 2).decode.id, of(muted, 2).create.id], [3, 4]);
  assert.deepEqual([of(muted, 7), of({}, 2)], [null, null]);
});

const LOW = "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors";
const FIRST = { add_noise: "enable", noise_seed: 7, steps: 4, cfg: 1, sampler_name: "euler", scheduler: "simple",
  start_at_step: 0, end_at_step: 2, return_with_leftover_noise: "enable" };
const LAST = { ...FIRST, add_noise: "disable", noise_seed: 0, start_at_step: 2, end_at_step: 10000,
  return_with_leftover_noise: "disable" };

// Two experts, each with a KSampler (Advanced). first, last: values in the place of theirs.
function experts(first = {}, last = {}, more = []) {
  const inputs = (model, latent) => ({
    model: [model, 0, "MODEL"], positive: [5, 0, "CONDITIONING"], negative: [5, 1, "CONDITIONING"],
    latent_image: [latent, latent === 5 ? 2 : 0, "LATENT"],
  });
  return graph([
    loader(1, HIGH), loader(2, LOW), through(3, "WanCoreAccelerate", [1, 0]),
    [5, "WanImageToVideo", {}, ["CONDITIONING", "CONDITIONING", "LATENT"]],
    [6, "KSamplerAdvanced", inputs(3, 5), ["LATENT"], { values: { ...FIRST, ...first } }],
    [7, "KSamplerAdvanced", inputs(2, 6), ["LATENT"], { values: { ...LAST, ...last } }],
    [8, "VAEDecode", { samples: [7, 0, "LATENT"] }, ["IMAGE"]], ...more,
  ]);
}

test("two samplers with the two experts are one WanCore Sampler, with the models from before WanCore Accelerate", () => {
  const { runs, refused } = onAllGpus(experts());
  assert.deepEqual(refused, []);
  assert.deepEqual(runs.map(({ first, last, models }) => [first.id, last.id, models.map((one) => one.origin_id)]), [[6, 7, [1, 2]]]);
  const one = { values: { seed: 1, steps: 4, cfg: 1, sampler_name: "heun", scheduler: "simple", denoise: 1 } };
  assert.deepEqual(onAllGpus(graph([loader(1, HIGH), sampler(2, [1, 0], one)])).runs.map(({ models }) => models.length), [1]);
});

test("one model of two samplers is there once, and twice where each has a cfg of its own", () => {
  const models = (cfg) => onAllGpus(graph([
    loader(1, HIGH), [5, "EmptyLatentImage", {}, ["LATENT"]],
    [6, "KSamplerAdvanced", { model: [1, 0, "MODEL"], latent_image: [5, 0, "LATENT"] }, ["LATENT"], { values: FIRST }],
    [7, "KSamplerAdvanced", { model: [1, 0, "MODEL"], latent_image: [6, 0, "LATENT"] }, ["LATENT"], { values: { ...LAST, cfg } }],
  ])).runs[0].models.map((one) => one.origin_id);
  assert.deepEqual([models(1), models(2)], [[1], [1, 1]]);
});

test("what WanCore Sampler cannot do is refused in words, and then nothing is changed", () => {
  const why = (...changed) => {
    const { runs, refused } = onAllGpus(experts(...changed));
    assert.deepEqual(runs, []);
    return refused.join("; ");
  };
  assert.match(why({ sampler_name: "res_multistep" }), /KSamplerAdvanced 7: with res_multistep .* another; it takes euler$/);
  assert.match(why({ end_at_step: 0 }, { start_at_step: 0 }), /KSamplerAdvanced 6 has no step/);
  assert.match(why({}, { cfg: 0 }), /its cfg is 0/);
  assert.match(why({}, { start_at_step: 3 }), /it does not go on where KSamplerAdvanced 6 ends/);
  assert.match(why({}, { steps: 8 }), /its steps is another than that of KSamplerAdvanced 6/);
  assert.match(why({ start_at_step: 1 }), /it leaves steps out/);
  assert.match(why({}, {}, [[9, "LatentUpscale", { samples: [6, 0, "LATENT"] }, ["LATENT"]]]), /it is a part of a run|does not go on/);
  assert.match(why({}, {}, [[9, "SamplerCustom", { model: [1, 0, "MODEL"] }, ["LATENT"]]]), /SamplerCustom 9 is no sampler/);
  const alone = (values, inputs = {}) => onAllGpus(graph([
    loader(1, HIGH),
    [2, "KSampler", { model: [1, 0, "MODEL"], ...inputs }, ["LATENT"], { values: { sampler_name: "euler", denoise: 1, cfg: 1, ...values } }],
    [3, "PrimitiveFloat", {}, ["FLOAT"]], [4, "KSamplerSelect", {}, ["COMBO"]],
  ])).refused[0];
  assert.match(alone({ denoise: 0.5 }), /it starts from a video/);
  assert.match(alone({}, { denoise: [3, 0, "FLOAT"] }), /it starts from a video/);
  assert.match(alone({}, { sampler_name: [4, 0, "COMBO"] }), /another node says its sampler/);
  for (const name of ["lcm", "uni_pc", "dpmpp_2m"]) {
    assert.match(alone({ sampler_name: name }), new RegExp(`with ${name} .* another; it takes euler, heun, res_multistep`));
  }
  assert.equal(alone({ sampler_name: "res_multistep" }), undefined);
  assert.match(onAllGpus(graph([loader(1, "flux.safetensors"), sampler(2, [1, 0])])).refused[0], /no Wan model was found/);
});

test("the samplers in whose place a WanCore Sampler is, are known by their prompts and latents", () => {
  const added = [
    [10, "WanCoreLauncher", {}, ["WANCORE_WORKERS"]],
    [11, "WanCoreFromModel", { model: [1, 0, "MODEL"], low: [2, 0, "MODEL"], workers: [10, 0, "WANCORE_WORKERS"] }, ["W"]],
    [12, "BasicScheduler", { model: [1, 0, "MODEL"] }, ["SIGMAS"]],
    [13, "WanCoreSampler", { model: [11, 0, "W"], positive: [5, 0, "CONDITIONING"], negative: [5, 1, "CONDITIONING"],
      latent: [5, 2, "LATENT"], sigmas: [12, 0, "SIGMAS"] }, ["LATENT"]],
  ];
  const made = experts({}, {}, added);
  const of = () => samplersOf(made, made.getNodeById(13));
  assert.equal(of(), null);
  for (const id of [6, 7]) made.getNodeById(id).mode = 2;
  assert.equal(of(), null); // its latents still go on
  const { links } = made;
  for (const [id, link] of Object.entries(links)) if (link.origin_id === 7) delete links[id];
  Object.defineProperty(made, "links", { value: links });
  assert.deepEqual([of().first.id, of().last.id, of().added.map((node) => node.id)], [6, 7, [13, 11, 12, 10]]);
});

test("the offer says whether this card was measured", () => {
  const on = (name, type = "cuda") => measured([{ name, type }]);
  assert.equal(on("cuda:0 NVIDIA H100 80GB HBM3 : cudaMallocAsync"), "Measured on NVIDIA H100 80GB HBM3: 1.46 times as fast.");
  assert.match(on("cuda:0 NVIDIA GeForce RTX 4090 : native"), /^Not measured on NVIDIA GeForce RTX 4090 yet/);
  assert.deepEqual([on("cpu", "cpu"), measured([])], ["", ""]);
});

test("a Wan VAE gets its node for what encodes pictures for a sampler, in subgraphs too, once", () => {
  const vae = (id, file, type = "VAELoader") => [id, type, {}, ["VAE"], { texts: [file] }];
  const encode = (id, from, type = "WanImageToVideo", more = {}) => [id, type, { vae: [...from, "VAE"] }, ["CONDITIONING", "LATENT"], more];
  const faster = (id, from, more = {}) => [id, "WanCoreAccelerateVAE", { vae: [...from, "VAE"] }, ["VAE"], more];
  const made = encoders(graph([
    vae(1, "wan_2.1_vae.safetensors"),
    encode(2, [1, 0]),
    [3, "VAEDecode", { vae: [1, 0, "VAE"] }, ["IMAGE"]],
    encode(4, [1, 0], "WanVaceToVideo", { mode: 4 }),
    [5, "sub", { vae: [1, 0, "VAE"] }, ["CONDITIONING"], { subgraph: graph([encode(6, [-10, 0])], ["vae"], [[6, 0]]) }],
    vae(7, "ltx_vae.safetensors"),
    encode(8, [7, 0]),
    encode(9, [1, 0], "LTXVImgToVideo"),
    faster(10, [1, 0]),
    encode(11, [10, 0]),
    vae(12, "wan_2.1_vae.safetensors", "WanCoreVAELoader"),
    encode(13, [12, 0], "WanCoreImageToVideo"),
    faster(14, [1, 0], { mode: 4 }),
    [15, "SetNode", { VAE: [14, 0, "VAE"] }, ["VAE"], { texts: ["vae"] }],
    [16, "GetNode", {}, ["VAE"], { texts: ["vae"] }],
    encode(17, [16, 0]),
    [18, "Reroute", { "": [1, 0, "*"] }, ["VAE"]],
    encode(19, [18, 0]),
  ]));
  // The bypassed one (4) shares the wire: it is as fast when it is switched on.
  assert.deepEqual(made.wires.map((wire) => [wire.node.id, wire.ends.map(([node]) => node.id)]), [[1, [2, 4, 5]], [18, [19]]]);
  assert.equal(encoded(made), "WanCore Accelerate VAE is behind VAELoader 1, Reroute 18: equal frames are encoded once. " +
    "Left: WanCoreAccelerateVAE 14 is there and bypassed.");
  assert.equal(encoded(encoders(graph([]))), "");
  const found = plan(graph([]));
  assert.deepEqual([accelerated(found, true), accelerated(found)],
    ["Ctrl+Z takes it back.", "Nothing to add: no Wan model was found on its way to a sampler."]);
});

test("WanCore Decode to Video is placed where WanCore Accelerate VAE is behind the loader", () => {
  const { pairs } = videos(graph([
    [1, "VAELoader", {}, ["VAE"], { texts: ["wan_2.1_vae.safetensors"] }],
    [2, "WanCoreAccelerateVAE", { vae: [1, 0, "VAE"] }, ["VAE"]],
    [3, "VAEDecode", { samples: "LATENT", vae: [2, 0, "VAE"] }, ["IMAGE"]],
    [4, "CreateVideo", { images: [3, 0, "IMAGE"] }, ["VIDEO"]],
    [5, "SaveVideo", { video: [4, 0, "VIDEO"] }, []],
  ]));
  assert.equal(pairs.length, 1);
});

test("a Wan VAE behind a switch is left, and the message says so", () => {
  const vae = (id, file) => [id, "VAELoader", {}, ["VAE"], { texts: [file] }];
  const chosen = (file, kind, more = []) => graph([
    vae(1, file), vae(2, "ltx_vae.safetensors"),
    [3, "Switch", { on: [1, 0, kind], off: [2, 0, kind] }, [kind]],
    [4, "Any", { "": [3, 0, "*"] }, ["*"]],
    [5, "WanImageToVideo", { vae: [4, 0, "VAE"] }, ["CONDITIONING", "LATENT"]],
    [6, "VAEDecode", { samples: "LATENT", vae: [4, 0, "VAE"] }, ["IMAGE"]],
    [7, "CreateVideo", { images: [6, 0, "IMAGE"] }, ["VIDEO"]],
    [8, "SaveVideo", { video: [7, 0, "VIDEO"] }, []], ...more,
  ]);
  for (const kind of ["*", "VAE"]) {
    const one = chosen("wan_2.1_vae.safetensors", kind);
    assert.deepEqual([encoders(one).wires, pairs(videos(one))], [[], []]);
    assert.equal(encoded(encoders(one)), "Left: which VAE Any 4 gives is not known: connect WanCore Accelerate VAE behind it by hand.");
    assert.equal(streamed(videos(one)), "Left: CreateVideo 7: which VAE Any 4 gives is not known.");
    const other = chosen("ltx_vae.safetensors", kind);
    assert.deepEqual([encoded(encoders(other)), streamed(videos(other))], ["", ""]);
  }
  const by_hand = chosen("wan_2.1_vae.safetensors", "*", [
    [9, "WanCoreAccelerateVAE", { vae: [4, 0, "VAE"] }, ["VAE"]],
    [10, "WanImageToVideo", { vae: [9, 0, "VAE"] }, ["CONDITIONING", "LATENT"]],
  ]);
  by_hand.nodes.splice(4, 1);
  assert.equal(encoded(encoders(by_hand)), "");
});
