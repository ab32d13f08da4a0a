// Shows on WanCore's nodes the text they return: what a loader recognised, the plan in one line, how long a run took.
// ComfyUI's page has a place for text on a node, which it fills from `progress_text` events; a result that comes from
// the cache sends no such event, only `executed`.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

app.registerExtension({
  name: "WanCore.text",
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
