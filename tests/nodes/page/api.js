// The part of ComfyUI's `api` that wancore.js uses.
class Api extends EventTarget {
  dispatchCustomEvent(kind, detail) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }
}
export const api = new Api();
