// Up to four videos that began with the same picture, played in step.
//
//   <video-grid videos="video/A.mp4 video/B.mp4" labels='["moves left", "moves right"]' frames="49" fps="24"
//               width="448" height="256"></video-grid>
//
// Needs clock.js. A classic script and not a module: gr.HTML's `head` drops the type of the scripts that it inserts.
(() => {
  "use strict";
  if (customElements.get("video-grid")) return;

  const STYLE = new URL("grid.css", document.currentScript?.src ?? document.baseURI).href;
  const LETTERS = "ABCD";

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  class VideoGrid extends HTMLElement {
    static observedAttributes = ["videos"];

    constructor() {
      super();
      this.attachShadow({ mode: "open" });
      this.shown = "";
    }

    connectedCallback() {
      this.update();
    }

    disconnectedCallback() {
      // The page may only be moving the element.
      setTimeout(() => this.isConnected || this.clear(), 500);
    }

    attributeChangedCallback() {
      // The other attributes change with this one.
      queueMicrotask(() => this.isConnected && this.update());
    }

    clear() {
      this.clock?.stop();
      this.clock = null;
      this.shown = "";
      this.shadowRoot.replaceChildren();
    }

    update() {
      const sources = this.getAttribute("videos") ?? "";
      if (sources === this.shown) return;
      this.clear();
      this.shown = sources;
      const [frames, fps] = ["frames", "fps"].map((name) => Number(this.getAttribute(name)));
      const labels = JSON.parse(this.getAttribute("labels") ?? "[]");
      const figures = sources.split(" ").filter(Boolean).map((source, k) => this.figure(source, labels[k], LETTERS[k]));
      if (!figures.length) return;
      const stage = make("div", { className: "stage" }, ...figures);
      stage.style.setProperty("--ratio", `${this.getAttribute("width")} / ${this.getAttribute("height")}`);
      this.root = make("div", { className: "grid", tabIndex: 0, role: "group" }, stage, this.controls(frames));
      this.root.setAttribute("aria-label", "Videos that began alike, played in step");
      this.root.setAttribute("aria-keyshortcuts", "Space ArrowLeft ArrowRight Home End");
      this.root.addEventListener("keydown", (event) => this.key(event));
      this.shadowRoot.replaceChildren(make("link", { rel: "stylesheet", href: STYLE }), this.root);
      const videos = figures.map((figure) => figure.querySelector("video"));
      this.clock = new window.VideoClock(videos, fps, frames, () => this.show());
      this.show();
    }

    figure(source, label, letter) {
      const video = make("video", { src: source, muted: true, playsInline: true, preload: "auto" });
      video.setAttribute("aria-label", `${letter}: ${label}`);
      video.addEventListener("click", () => this.toggle());
      return make("figure", {}, video, make("figcaption", {}, make("b", {}, letter), ` ${label}`));
    }

    controls(frames) {
      this.button = make("button", { type: "button", onclick: () => this.toggle() }, "Play");
      this.scrubber = make("input", { type: "range", min: 0, max: frames - 1, step: 1, value: 0, ariaLabel: "Frame" });
      this.scrubber.addEventListener("input", () => this.clock.seek(Number(this.scrubber.value)));
      this.place = make("output");
      return make("div", { className: "controls" }, this.button, this.scrubber, this.place);
    }

    toggle() {
      return this.clock.playing ? this.clock.pause() : this.clock.play();
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (["BUTTON", "INPUT"].includes(event.composedPath()[0].tagName)) return;
      const actions = {
        " ": () => this.toggle(),
        ArrowLeft: () => this.clock.seek(this.clock.frame - 1),
        ArrowRight: () => this.clock.seek(this.clock.frame + 1),
        Home: () => this.clock.seek(0),
        End: () => this.clock.seek(this.clock.frames - 1),
      };
      const action = actions[event.key];
      if (!action) return;
      action();
      event.preventDefault();
    }

    show() {
      if (!this.clock) return;
      const { frame, frames, playing } = this.clock;
      this.button.textContent = playing ? "Pause" : "Play";
      this.scrubber.value = frame;
      this.place.textContent = `Frame ${frame + 1} of ${frames}`;
    }
  }

  customElements.define("video-grid", VideoGrid);
})();
