// What wancore.js decides without the page: how a text looks on a node, which lines of it are warnings, which node an
// id names, and what a toast says.

const INVISIBLE = "\uFEFF"; // no width, and white space to the page's Markdown
const WARNING = "warning: "; // as nodes/ begins such a line
const LINES = 3; // of a message in a toast
const MOST = 320; // letters of them
export const TEXT = "$$"; // how the names of the widgets begin that the page adds to show something

// The page's two renderers show one text: the classic one as it is, with its line breaks; Nodes 2.0 as Markdown, which
// joins lines unless two spaces are before the break. What Markdown would read as formatting (a file's name may have
// it) is kept apart by a letter that no one sees. No line begins with anything else, so none is a heading or a list.
export function readable(text) {
  return text
    .trimEnd()
    .split("\n")
    .map((line) => (line.startsWith(WARNING) ? `⚠ ${line.slice(WARNING.length)}` : line))
    .map((line) => INVISIBLE + line.replaceAll("`", "'").replace(FORMATTING, `$&${INVISIBLE}`))
    .join("  \n");
}

const FORMATTING = /(?<![\p{L}\p{N}])_|_(?![\p{L}\p{N}])|[*~<&\\[\]!]/gu;

export function warningsOf(text) {
  return text.split("\n").flatMap((line) => (line.startsWith(WARNING) ? [line.slice(WARNING.length)] : []));
}

// What a node said of its work, once that was interrupted or failed: "step 8 of 60, 14 s left" is "stopped: step 8 of 60".
export function stopped(text) {
  const lines = text.trimEnd().split("\n");
  return [...lines.slice(0, -1), `stopped: ${lines.at(-1).split(",")[0]}`].join("\n");
}

// What stands on a box of nodes that said something, [node, text] each; null: none of them is of interest there. The
// counts of WanCore Accelerate, for those who look into it, stay on the node.
const ON_BOX = ["WanCoreSampler", "WanCoreAccelerate"];

export function onBox(...entries) {
  const shown = entries.filter(([node]) => ON_BOX.includes(node.type));
  const lines = shown.flatMap(([node, text]) => {
    const own = text.trimEnd().split("\n").filter((line) => !line.startsWith("WanCore Accelerate: "));
    return shown.length > 1 ? [`${node.title}:`, ...own] : own;
  });
  return shown.length ? lines.join("\n") : null;
}

// The node that the parts of an id lead to: "7", or "129:168" for node 168 in the subgraph of node 129.
export function findNode(graph, id) {
  let node = null;
  for (const part of String(id).split(":")) {
    const inside = node === null ? graph : node.subgraph;
    node = inside?.getNodeById(part) ?? inside?.getNodeById(Number(part)) ?? null;
    if (node === null) return null;
  }
  return node;
}

// An error of this pack as a toast; null for one that is not: those the page shows alone. node: the one that the error
// names. For a copy of a node in a loop that is the node which made the copies: its title would mislead.
export function errorToast({ exception_type, exception_message, node_type }, node) {
  if (!exception_type?.startsWith("wan_core.")) return null;
  const summary = node && node.type === node_type ? node.title : node_type;
  return { severity: "error", summary, detail: shortened(exception_message), life: 30_000 };
}

export function warningToast(words, node) {
  return { severity: "warn", summary: node.title, detail: shortened(words), life: 30_000 };
}

function shortened(text) {
  const words = text.trim().split("\n").slice(0, LINES).join(" ").replace(/\s+/g, " ");
  return words.length <= MOST ? words : `${words.slice(0, MOST).replace(/\s\S*$/, "")} ...`;
}

// A node's saved values without what the page shows on it, which stands after the node's own: where a later version has
// one more input, the page would read it as that input's value.
export function withoutTexts(saved, widgets) {
  const first = widgets.findIndex((widget) => widget.name.startsWith(TEXT));
  if (first >= 0) saved.widgets_values = saved.widgets_values?.slice(0, first);
  for (const name of Object.keys(saved.widgets_values_named ?? {})) {
    if (name.startsWith(TEXT)) delete saved.widgets_values_named[name];
  }
}
