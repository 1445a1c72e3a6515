// Two decodes of the same latents, looked at together: players on one clock, a wipe, single frames without loss, the
// difference of the raw frames, and a chart of every frame.
//
//   <compare-view src="compare/JOB.json"></compare-view>
//
// Needs clock.js. A classic script and not a module: gr.HTML's `head` drops the type of the scripts that it inserts.
(() => {
  "use strict";
  if (customElements.get("compare-view")) return;

  const STYLE = new URL("compare.css", document.currentScript?.src ?? document.baseURI).href;
  const GAINS = [1, 4, 16, 64, 255];
  const SPEEDS = [0.1, 0.25, 0.5, 1, 2];
  const MODES = { side: "Side by side", wipe: "Wipe", frame: "Single frame", difference: "Difference" };
  const SOON_MS = 80; // dragging asks for many frames; only where it rests is one worth fetching
  const FAR = 4; // times the height of what is drawn

  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const number = (value) => (value === null ? NaN : Number(value)); // "Infinity" comes as a string

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name in element && name !== "list") element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  // ---- chart -------------------------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  const EDGE = { left: 56, right: 10, top: 8, bottom: 18 };

  function draw(parent, tag, attributes, text = "") {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    parent.append(element);
    return element;
  }

  /** One figure of every frame as a line; a click goes to that frame. An infinite value stands at the upper edge. */
  class Chart {
    constructor({ name, values, worst, limit, digits, pick }) {
      Object.assign(this, { values, worst, limit, digits, pick });
      const caption = this.limit ? `${name} (at least ${this.limit})` : name;
      this.svg = document.createElementNS(SVG, "svg");
      this.svg.setAttribute("role", "img");
      this.svg.setAttribute("aria-label", `${name} of every frame; the worst is frame ${worst}`);
      this.element = make("figure", { className: "chart" }, make("figcaption", {}, caption), this.svg);
      this.svg.addEventListener("pointerdown", (event) => this.picked(event));
      this.svg.addEventListener("pointermove", (event) => event.buttons && this.picked(event));
      new ResizeObserver(() => this.redraw()).observe(this.svg);
    }

    picked(event) {
      const { left } = this.svg.getBoundingClientRect();
      const share = (event.clientX - left - EDGE.left) / Math.max(1, this.width);
      this.pick(clamp(Math.round(share * (this.values.length - 1)), 0, this.values.length - 1));
    }

    range() {
      const known = this.values.filter(Number.isFinite);
      if (!known.length) return [0, 1];
      let [low, high] = [Math.min(...known), Math.max(...known)];
      // A limit far away would press the line flat; then it stands in the caption alone.
      this.limitShown = this.limit < high && low - this.limit <= FAR * (high - low);
      if (this.limitShown) low = Math.min(low, this.limit);
      if (this.limit >= high) [this.limitShown, high] = [true, this.limit];
      const room = (high - low || Math.abs(high) * 0.01 || 1) * 0.12;
      return [low - room, high + room];
    }

    x(frame) {
      return EDGE.left + (frame / Math.max(1, this.values.length - 1)) * this.width;
    }

    y(value) {
      const [low, high] = this.bounds;
      const share = Number.isFinite(value) ? (value - low) / (high - low) : 1;
      return EDGE.top + (1 - share) * this.height;
    }

    redraw() {
      const { width, height } = this.svg.getBoundingClientRect();
      if (!width) return;
      this.width = width - EDGE.left - EDGE.right;
      this.height = height - EDGE.top - EDGE.bottom;
      this.bounds = this.range();
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.replaceChildren();
      this.axes();
      const points = this.values.map((value, frame) => `${this.x(frame)},${this.y(value)}`);
      draw(this.svg, "polyline", { class: "values", points: points.join(" ") });
      if (points.length <= 80) points.forEach((point) => this.dot(point, "dot", 2));
      this.dot(points[this.worst], "worst", 5);
      this.cursor = draw(this.svg, "line", { class: "cursor", y1: EDGE.top, y2: EDGE.top + this.height });
      this.show(this.frame ?? 0);
    }

    dot(point, name, r) {
      const [cx, cy] = point.split(",");
      draw(this.svg, "circle", { class: name, cx, cy, r });
    }

    axes() {
      const bottom = EDGE.top + this.height;
      const edges = { class: "axis", x1: EDGE.left, x2: EDGE.left + this.width };
      draw(this.svg, "line", { ...edges, y1: bottom, y2: bottom });
      const known = this.values.some(Number.isFinite);
      const label = (value, y) => draw(this.svg, "text", { x: EDGE.left - 6, y, "text-anchor": "end" }, value);
      if (known) {
        const finite = this.values.filter(Number.isFinite);
        const [low, high] = [Math.min(...finite), Math.max(...finite)];
        label(high.toFixed(this.digits), this.y(high) + 4);
        if (this.y(low) - this.y(high) > 14) label(low.toFixed(this.digits), this.y(low) + 4);
      }
      if (this.values.includes(Infinity)) label("∞", EDGE.top + 5);
      if (this.limitShown) {
        const y = this.y(this.limit);
        draw(this.svg, "line", { ...edges, class: "limit", y1: y, y2: y });
        const text = { class: "limit", x: EDGE.left + this.width, y: y - 4, "text-anchor": "end" };
        draw(this.svg, "text", text, `limit ${this.limit}`);
      }
      const last = this.values.length - 1;
      draw(this.svg, "text", { x: EDGE.left, y: bottom + 14 }, "frame 0");
      if (last) draw(this.svg, "text", { x: EDGE.left + this.width, y: bottom + 14, "text-anchor": "end" }, last);
    }

    show(frame) {
      this.frame = frame;
      this.cursor?.setAttribute("x1", this.x(frame));
      this.cursor?.setAttribute("x2", this.x(frame));
    }
  }

  // ---- the view ----------------------------------------------------------------------------------------------------

  class CompareView extends HTMLElement {
    static observedAttributes = ["src"];

    constructor() {
      super();
      this.attachShadow({ mode: "open" });
      this.mode = "side";
      this.loaded = null;
    }

    connectedCallback() {
      this.update();
    }

    disconnectedCallback() {
      // The page may only be moving the element.
      setTimeout(() => this.isConnected || this.clear(), 500);
    }

    attributeChangedCallback() {
      if (this.isConnected) this.update();
    }

    clear() {
      this.clock?.stop();
      this.clock = null;
      this.loaded = null;
      this.shadowRoot.replaceChildren();
    }

    async update() {
      const src = this.getAttribute("src");
      if (!src || src === this.loaded) return;
      this.clear();
      this.loaded = src;
      try {
        const answer = await fetch(new URL(src, document.baseURI));
        if (!answer.ok) throw new Error(await answer.text());
        const result = await answer.json();
        if (this.loaded === src) this.build(result, src.replace(/\.json$/, ""));
      } catch (error) {
        this.shadowRoot.replaceChildren(make("p", { role: "alert" }, `The comparison can't be shown: ${error.message}`));
      }
    }

    build(result, address) {
      Object.assign(this, { result, address, charts: [], asked: "" });
      this.names = ["a", "b"].filter((name) => result.sides[name].video);
      this.both = this.names.length === 2 && Boolean(result.figures);
      this.root = make("div", { className: "view", tabIndex: 0, role: "group" });
      this.root.setAttribute("aria-label", "Two decodes of the same latents");
      this.root.setAttribute("aria-keyshortcuts", "Space ArrowLeft ArrowRight Home End L");
      this.root.append(this.modes(), this.makeStage(), this.controls(), this.note());
      if (this.both) this.root.append(this.makeCharts());
      this.shadowRoot.replaceChildren(make("link", { rel: "stylesheet", href: STYLE }), this.root);
      const videos = this.names.map((name) => this.figures[name].querySelector("video"));
      this.clock = new window.VideoClock(videos, result.fps, result.frames, () => this.show());
      this.root.addEventListener("keydown", (event) => this.key(event));
      this.setMode("side");
      this.moveLine(50);
    }

    // -- parts

    modes() {
      const names = this.names.length === 2 ? Object.keys(MODES) : ["side", "frame"];
      const labels = this.names.length === 2 ? MODES : { side: "Video", frame: "Single frame" };
      this.modeButtons = names.map((name) =>
        make("button", { type: "button", onclick: () => this.setMode(name), "data-mode": name }, labels[name]),
      );
      const group = make("div", { className: "modes", role: "group" }, ...this.modeButtons);
      group.setAttribute("aria-label", "How to look at them");
      return group;
    }

    makeStage() {
      const { width, height } = this.result;
      this.figures = Object.fromEntries(["a", "b"].map((name) => [name, this.figure(name)]));
      this.difference = make("img", { className: "difference", alt: "Difference of the two frames, amplified" });
      this.line = make("div", { className: "line", role: "slider", tabIndex: 0 });
      this.line.setAttribute("aria-label", "Dividing line between A, left, and B, right");
      this.line.addEventListener("keydown", (event) => this.lineKey(event));
      const parts = [this.figures.a, this.figures.b, this.difference, this.line];
      this.stage = make("div", { className: "stage" }, ...parts);
      this.stage.style.setProperty("--ratio", `${width} / ${height}`);
      this.stage.addEventListener("pointerdown", (event) => this.drag(event));
      this.stage.addEventListener("pointermove", (event) => event.buttons && this.drag(event));
      return this.stage;
    }

    figure(name) {
      const side = this.result.sides[name];
      const label = `${name.toUpperCase()}: ${side.path}, ${side.precision}`;
      const figure = make("figure", { className: name });
      if (side.video) {
        const source = `${this.address}/${name}.mp4`;
        const video = make("video", { src: source, muted: true, playsInline: true, preload: "auto" });
        video.setAttribute("aria-label", label);
        figure.append(video, make("img", { className: "still", alt: `${label}, one frame without loss` }));
      } else {
        figure.append(make("p", { className: "missing" }, side.error ?? "This side has no video."));
      }
      figure.append(make("figcaption", {}, label));
      return figure;
    }

    controls() {
      const button = (text, label, action) => make("button", { type: "button", onclick: action, ariaLabel: label }, text);
      const select = (label, values, value, text, action) => {
        const options = values.map((each) => make("option", { value: each, selected: each === value }, text(each)));
        const field = make("select", { onchange: (event) => action(Number(event.target.value)) }, ...options);
        return make("label", {}, `${label} `, field);
      };
      const last = this.result.frames - 1;
      this.playButton = button("Play", "Play", () => this.toggle());
      this.scrubber = make("input", { type: "range", min: 0, max: last, step: 1, value: 0, ariaLabel: "Frame" });
      this.scrubber.addEventListener("input", () => this.clock.seek(Number(this.scrubber.value)));
      this.place = make("output", { className: "place" });
      this.loopBox = make("input", { type: "checkbox", checked: true, onchange: () => this.setLoop() });
      const levels = this.result.figures?.max_levels || 1;
      this.gain = [...GAINS].reverse().find((gain) => gain * levels <= 255) ?? 1;
      this.gainField = select("Gain", GAINS, this.gain, (gain) => `${gain} x`, (gain) => this.setGain(gain));
      this.gainField.classList.add("gain");
      const row = make(
        "div",
        { className: "controls" },
        this.playButton,
        button("◀", "One frame back", () => this.step(-1)),
        button("▶", "One frame on", () => this.step(1)),
        this.scrubber,
        this.place,
        select("Speed", SPEEDS, 1, (speed) => `${speed} x`, (speed) => this.clock.setSpeed(speed)),
        make("label", {}, this.loopBox, " Loop"),
        this.gainField,
      );
      if (this.both) {
        const worst = this.result.figures.worst_frame;
        row.append(button("Worst frame", `Go to the worst frame, ${worst}`, () => this.clock.seek(worst)));
      }
      return row;
    }

    note() {
      this.message = make("p", { className: "note", role: "status" });
      return this.message;
    }

    makeCharts() {
      const { per_frame: frames, worst_frame: worst } = this.result.figures;
      const limits = this.result.verdict?.limits ?? {};
      const pick = (frame) => this.clock.seek(frame);
      const ssim = frames.map((frame) => number(frame.ssim));
      this.charts = [
        new Chart({
          name: "PSNR of float frames, dB",
          values: frames.map((frame) => number(frame.psnr)),
          worst,
          limit: limits.psnr,
          digits: 1,
          pick,
        }),
        new Chart({
          name: "SSIM",
          values: ssim,
          worst: ssim.indexOf(Math.min(...ssim)),
          limit: limits.ssim,
          digits: 5,
          pick,
        }),
      ];
      return make("div", { className: "charts" }, ...this.charts.map((chart) => chart.element));
    }

    // -- what happens

    setMode(mode) {
      this.mode = mode;
      this.stage.dataset.mode = mode;
      this.stage.classList.toggle("single", this.names.length < 2);
      for (const button of this.modeButtons) button.ariaPressed = String(button.dataset.mode === mode);
      this.gainField.hidden = mode !== "difference";
      if (this.still) this.clock.pause();
      this.show();
    }

    /** Whether this mode shows pictures instead of videos. */
    get still() {
      return this.mode === "frame" || this.mode === "difference";
    }

    toggle() {
      if (this.still) this.setMode(this.mode === "frame" && this.names.length === 2 ? "wipe" : "side");
      if (this.clock.playing) this.clock.pause();
      else this.clock.play();
    }

    step(frames) {
      return this.clock.seek(this.clock.frame + frames);
    }

    setLoop() {
      this.clock.loop = this.loopBox.checked;
    }

    setGain(gain) {
      this.gain = gain;
      this.show();
    }

    moveLine(percent) {
      this.percent = clamp(percent, 0, 100);
      this.stage.style.setProperty("--line", `${this.percent}%`);
      this.line.ariaValueNow = String(Math.round(this.percent));
    }

    drag(event) {
      if (!["wipe", "frame"].includes(this.mode) || this.names.length < 2) return;
      const { left, width } = this.stage.getBoundingClientRect();
      this.moveLine(((event.clientX - left) / width) * 100);
      event.preventDefault();
    }

    lineKey(event) {
      const step = { ArrowLeft: -2, ArrowRight: 2 }[event.key];
      if (!step) return;
      this.moveLine(this.percent + step);
      event.preventDefault();
      event.stopPropagation();
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const field = event.composedPath()[0];
      if (field.matches?.("select") || (field.matches?.("button, input") && event.key === " ")) return;
      const pace = event.shiftKey ? 10 : 1;
      const actions = {
        " ": () => this.toggle(),
        ArrowLeft: () => this.step(-pace),
        ArrowRight: () => this.step(pace),
        Home: () => this.clock.seek(0),
        End: () => this.clock.seek(this.result.frames - 1),
        l: () => ((this.loopBox.checked = !this.loopBox.checked), this.setLoop()),
      };
      const action = actions[event.key] ?? actions[event.key.toLowerCase()];
      if (!action) return;
      action();
      event.preventDefault();
    }

    /** Bring everything to the frame of the clock. */
    show() {
      if (!this.clock) return;
      const { frame, playing } = this.clock;
      this.playButton.textContent = playing ? "Pause" : "Play";
      this.playButton.ariaLabel = playing ? "Pause" : "Play";
      this.scrubber.value = frame;
      const figures = this.both ? this.result.figures.per_frame[frame] : null;
      const psnr = number(figures?.psnr ?? null);
      const said = Number.isFinite(psnr) ? `${psnr.toFixed(1)} dB` : "identical";
      this.place.textContent = `Frame ${frame} (0 to ${this.result.frames - 1})${figures ? `: ${said}` : ""}`;
      this.charts.forEach((chart) => chart.show(frame));
      if (this.still) this.showStill(frame);
      else this.message.textContent = "";
    }

    showStill(frame) {
      const asked = `${this.mode} ${frame} ${this.gain}`;
      if (asked === this.asked) return;
      this.asked = asked;
      clearTimeout(this.soon);
      this.soon = setTimeout(() => this.fetchStill(frame), SOON_MS);
    }

    fetchStill(frame) {
      const failed = () => (this.message.textContent = "These frames can't be had any more; run the comparison again.");
      const load = (image, url) => Object.assign(image, { onerror: failed, src: url });
      this.message.textContent =
        this.mode === "frame"
          ? "The delivered bytes as PNG, without loss."
          : `|A - B| of the delivered bytes, ${this.gain} times. Black is no difference.`;
      if (this.mode === "difference") {
        load(this.difference, `${this.address}/difference/${frame}.png?gain=${this.gain}`);
        return;
      }
      for (const name of this.names) load(this.figures[name].querySelector("img"), `${this.address}/${name}/${frame}.png`);
    }
  }

  customElements.define("compare-view", CompareView);
})();
