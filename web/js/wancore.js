// Shows on WanCore's nodes the text they return: what a loader recognised, the plan in one line, how long a run took.
// ComfyUI's page has a place for text on a node, which it fills from `progress_text` events; a result that comes from
// the cache sends no such event, only `executed`.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

app.registerExtension({
  name: "WanCore.text",
  // The page saves that text with the node's values, after the last of them, where a later version may have one more
  // input: it would be read as its value.
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith("WanCore")) return;
    const before = nodeType.prototype.onSerialize;
    nodeType.prototype.onSerialize = function (saved) {
      before?.call(this, saved);
      saved.widgets_values = saved.widgets_values?.filter((_, at) => !this.widgets[at].name.startsWith("$$"));
    };
  },
  setup() {
    api.addEventListener("executed", ({ detail }) => {
      const id = String(detail.display_node ?? detail.node);
      const node = app.graph.getNodeById(id) ?? app.graph.getNodeById(Number(id));
      const text = detail.output?.text;
      if (text && node?.type?.startsWith("WanCore")) {
        api.dispatchCustomEvent("progress_text", { nodeId: id, text: [text].flat().join("\n") });
      }
    });
  },
});
