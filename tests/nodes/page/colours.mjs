// web/js/colours.js in the stand-in of the page. Run by test_page_script.py.
import assert from "node:assert/strict";
import test from "node:test";

const { COLOURS, keepColours } = await import("./extensions/wancore/js/colours.js");

test("a theme that does not know our sockets leaves their colours, and one that does sets them", () => {
  const theme = { MODEL: "#fff" };
  keepColours(theme);
  Object.assign(theme, { MODEL: "#000", WANCORE_MODEL: "", WANCORE_REPORT: "#123456" });
  assert.deepEqual({ ...theme }, { ...COLOURS, MODEL: "#000", WANCORE_REPORT: "#123456" });
});
