// Search without a server or a network. Browsers refuse workers in pages that are opened from disk, and the theme would load a substitute
// from unpkg.com. This one runs the worker's script in a hidden frame; the theme looks for the name IFrameWorker.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.frame = frame;
    this.receive = (event) => {
      if (event.source === frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
    };
    addEventListener("message", this.receive);
    frame.contentDocument.open();
    frame.contentDocument.write("<!doctype html><script>postMessage = (data) => parent.postMessage(data, '*')</script>");
    frame.contentDocument.close();
    const script = frame.contentDocument.createElement("script");
    this.loaded = new Promise((done) => (script.onload = done));
    script.src = url;
    frame.contentDocument.body.append(script);
  }

  postMessage(data) {
    this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    removeEventListener("message", this.receive);
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
