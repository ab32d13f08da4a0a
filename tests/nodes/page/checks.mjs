// web/js in the stand-in of the page beside this file. Run by test_page_script.py, which puts all of them where the
// page has them. FIRST: whether the page's own listeners stand before wancore.js's.
import assert from "node:assert/strict";
import test from "node:test";
import { api } from "./scripts/api.js";
import { Graph, app, extensions, listen, load, open, toasts } from "./scripts/app.js";

if (process.env.FIRST === "yes") listen();
await import("./extensions/wancore/js/wancore.js");
const [extension] = extensions;
extension.setup();
if (process.env.FIRST === "no") listen();
const { errorToast, findNode, readable, warningsOf, withoutTexts } = await import("./extensions/wancore/js/texts.js");

const node = (id, type = "WanCoreSampler", more = {}) => ({ id, type, title: `node ${id}`, ...more });
const say = (nodeId, text, more = {}) => api.dispatchCustomEvent("progress_text", { nodeId, text, ...more });
const executed = (id, text, more = {}) => api.dispatchCustomEvent("executed", { node: id, output: { text }, ...more });
const end = (kind = "execution_success") => api.dispatchCustomEvent(kind, { prompt_id: "1" });
const later = () => new Promise((done) => setTimeout(done, 5));
const plain = (text) => text?.replaceAll("\uFEFF", "").replaceAll("  \n", "\n");

test("lines keep their breaks, and nothing in them is formatting", () => {
  const text = "# one *two* __three__\n- _a_[b](c) <i>&amp; `d` ~~e~~\n\n1. t2v_high_noise.safetensors\\*";
  assert.equal(plain(readable(text)), text.replaceAll("`", "'"));
  const lines = readable(text).split("\n");
  assert.equal(lines.length, 4);
  assert.ok(lines.slice(0, -1).every((line) => line.endsWith("  ")) && lines.every((line) => line[0] === "\uFEFF"));
  assert.ok(!/[*~<&\\[\]!`](?!\uFEFF)/.test(readable(text)), "nothing may open or close a format");
  assert.ok(readable("t2v_high_noise.safetensors").includes("t2v_high_noise.safetensors"), "names can be copied");
  assert.equal(plain(readable("done\n\n")), "done");
});

test("warnings have a sign, and are found", () => {
  const text = "warning: the experts are swapped\ndone\nno warning: here";
  assert.ok(plain(readable(text)).startsWith("⚠ the experts are swapped\ndone"));
  assert.deepEqual(warningsOf(text), ["the experts are swapped"]);
});

test("a node is found by its path", () => {
  const inner = node(168);
  const graph = new Graph([node(7), node(129, "sub", { subgraph: new Graph([node(5, "s", { subgraph: new Graph([inner]) })]) })]);
  assert.equal(findNode(graph, "7").id, 7);
  assert.equal(findNode(graph, 7).id, 7);
  assert.equal(findNode(graph, "129:5:168"), inner);
  for (const id of ["8", "7:1", "129:9", "129:5:1", "", "5.0.0.1_7"]) assert.equal(findNode(graph, id), null, id);
});

test("a text is shown as it comes, and stays when the prompt has ended", async () => {
  const sampler = node(7);
  load([sampler, node(8, "KSampler")]);
  say("7", "step 1\nof 2", { prompt_id: "1" });
  assert.equal(plain(sampler.shown), "step 1\nof 2");
  assert.notEqual(sampler.shown, "step 1\nof 2");
  executed("7", ["done"]);
  assert.equal(plain(sampler.shown), "done");
  for (const kind of ["execution_success", "execution_error", "execution_interrupted"]) {
    end(kind);
    await later();
    assert.equal(plain(sampler.shown), "done");
  }
});

test("a node that was stopped says so, and where, and no time that is left", async () => {
  for (const kind of ["execution_interrupted", "execution_error"]) {
    const [sampler, other] = [node(7), node(8, "WanCoreAccelerate")];
    load([sampler, other]);
    executed("8", ["attention: sdpa"]);
    say("7", "warning: swapped\nstep 8 of 60, high-noise expert, 0.3 s a step, 14 s left");
    api.dispatchCustomEvent(kind, { node_id: "7", node_type: "WanCoreSampler" });
    await later();
    assert.deepEqual([sampler, other].map((one) => plain(one.shown)), ["⚠ swapped\nstopped: step 8 of 60", "attention: sdpa"]);
    executed("7", ["done in 3 s, 2 steps"]);
    api.dispatchCustomEvent(kind, { node_id: "7" });
    await later();
    assert.equal(plain(sampler.shown), "done in 3 s, 2 steps");
  }
});

test("what a node said after its result is not replaced by the result from the cache", () => {
  const [node7, node8] = [node(7, "WanCoreAccelerate"), node(8, "WanCoreModelLoader")];
  load([node7, node8]);
  executed("7", ["attention: sdpa"]);
  say("7", "2 s a step");
  api.dispatchCustomEvent("execution_start", {});
  api.dispatchCustomEvent("execution_cached", { nodes: ["7", "8"] });
  executed("7", ["attention: sdpa"]);
  executed("8", ["two experts"]);
  assert.deepEqual([node7, node8].map((one) => plain(one.shown)), ["2 s a step", "two experts"]);
  api.dispatchCustomEvent("execution_start", {});
  executed("7", ["attention: flash4"]);
  assert.equal(plain(node7.shown), "attention: flash4");
});

test("other packs' texts are left as they are", async () => {
  const other = node(8, "KSampler");
  load([other]);
  say("8", "a\nb");
  assert.equal(other.shown, "a\nb");
  executed("8", ["c"]);
  assert.equal(other.shown, "a\nb");
  end();
  await later();
  assert.equal(other.shown, undefined);
});

test("texts inside a subgraph are there when it is opened", async () => {
  const inner = node(168, "WanCorePlanPreview");
  const subgraph = new Graph([inner]);
  load([node(129, "sub", { subgraph })]);
  executed("129:168", ["22 of 40 forwards"]);
  assert.equal(inner.shown, undefined);
  end();
  await later();
  open(subgraph);
  await later();
  assert.equal(plain(inner.shown), "22 of 40 forwards");
});

test("what the sampler in a box did stands on the box too", async () => {
  const high = node(5, "WanCoreAccelerate"), low = node(6, "WanCoreAccelerate"), loader = node(4, "WanCoreModelLoader");
  const box = node(129, "sub", { subgraph: new Graph([loader, high, low]) });
  load([box]);
  say("129:4", "recognised");
  assert.equal(box.shown, undefined);
  say("129:5", "12.4 s instead of 19.5 s\nWanCore Accelerate: self-attention calls: 4 by sdpa");
  assert.equal(plain(box.shown), "12.4 s instead of 19.5 s");
  say("129:6", "1.3 s a step");
  assert.equal(plain(box.shown), "node 5:\n12.4 s instead of 19.5 s\nnode 6:\n1.3 s a step");
  end();
  await later();
  assert.ok(plain(box.shown).startsWith("node 5:"));
  api.dispatchCustomEvent("execution_start", { prompt_id: "2" });
  say("129:6", "step 1 of 4, 3 s left");
  assert.equal(plain(box.shown), "step 1 of 4, 3 s left");
  api.dispatchCustomEvent("execution_interrupted", { prompt_id: "2", node_id: "129:6" });
  await later();
  assert.equal(plain(box.shown), "stopped: step 1 of 4");
});

test("what a copy in a loop did is shown on the node that was copied", () => {
  const sampler = node(7);
  load([sampler]);
  executed("5.0.0.1_7", ["done"], { display_node: "7" });
  assert.equal(plain(sampler.shown), "done");
});

test("a warning is one toast in a row of prompts that have it", () => {
  load([node(2, "WanCoreModelLoader"), node(7)]);
  const run = (...texts) => {
    api.dispatchCustomEvent("execution_start", { prompt_id: "1" });
    texts.forEach((text, at) => executed([2, 7][at], [text]));
    end();
  };
  run("warning: swapped\nt2v", "warning: swapped\ndone");
  assert.deepEqual(toasts.map((toast) => [toast.severity, toast.summary, toast.detail]), [["warn", "node 2", "swapped"]]);
  run("warning: swapped\nt2v", "warning: swapped\ndone");
  assert.equal(toasts.length, 1);
  run("t2v", "done");
  run("warning: swapped\nt2v");
  assert.equal(toasts.length, 2);
});

test("this pack's errors are toasts of few words", () => {
  load([node(7)]);
  const fail = (exception_type, exception_message) =>
    api.dispatchCustomEvent("execution_error", { node_id: "7", node_type: "WanCoreSampler", exception_type, exception_message });
  fail("wan_core.config.checks.OptionError", "latents of [1, 48] given\n");
  assert.equal(toasts[0].severity, "error");
  assert.equal(toasts[0].summary, "node 7");
  assert.equal(toasts[0].detail, "latents of [1, 48] given");
  fail("RuntimeError", "shapes");
  assert.equal(toasts.length, 1);
  const long = errorToast({ exception_type: "wan_core.x", exception_message: "word ".repeat(500), node_type: "N" }, null);
  assert.ok(long.detail.length < 340 && long.detail.endsWith(" ...") && long.summary === "N");
  const inLoop = errorToast({ exception_type: "wan_core.x", exception_message: "a", node_type: "N" }, node(5, "StartLoop"));
  assert.equal(inLoop.summary, "N");
  assert.equal(errorToast({ exception_type: "wan_core.x", exception_message: "a\nb\nc\nd" }, null).detail, "a b c");
});

test("a node is saved without its texts, however the page keeps values", () => {
  const type = { prototype: {} };
  extension.beforeRegisterNodeDef(type, { name: "WanCoreSampler" });
  const widgets = [{ name: "seed" }, { name: "steps" }, { name: "$$node-text-preview" }];
  const named = { seed: 1, steps: 2 };
  for (const values of [[1, 2, "text"], [1, 2]]) {
    const saved = { widgets_values: values, widgets_values_named: { ...named, "$$node-text-preview": "text" } };
    type.prototype.onSerialize.call({ widgets }, saved);
    assert.deepEqual(saved, { widgets_values: [1, 2], widgets_values_named: named });
  }
  const saved = { widgets_values: [1, 2] };
  withoutTexts(saved, widgets.slice(0, 2));
  assert.deepEqual(saved.widgets_values, [1, 2]);
  withoutTexts({}, widgets);
  const other = { prototype: {} };
  extension.beforeRegisterNodeDef(other, { name: "KSampler" });
  assert.deepEqual(other.prototype, {});
});

test("what a run said in toasts goes when the next one is asked for", () => {
  load([node(7)]);
  say("7", "warning: told once");
  api.dispatchCustomEvent("execution_error", { exception_type: "wan_core.x", exception_message: "a", node_id: "7" });
  assert.equal(toasts.length, 2);
  toasts.push({ summary: "of the page" });
  for (let times = 0; times < 2; times++) api.dispatchCustomEvent("promptQueueing", {});
  assert.deepEqual(toasts, [{ summary: "of the page" }]);
});
