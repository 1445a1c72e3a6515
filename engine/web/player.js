// A player for a video that is still being decoded: an mp4 that grows on the server goes through Media Source into a
// <video>. Where the browser has no Media Source, or the job is over, it plays the final file instead.
//
//   <live-video src="live/JOB.mp4" final="video/JOB.mp4" width="1248" height="704" frames="121" fps="24"
//               poster="..." label="..."></live-video>
//   const player = attachLivePlayer(video, status, { url, finalUrl, fps, totalFrames });
//
// A classic script and not a module: gr.HTML's `head` drops the type of the scripts that it inserts.
(() => {
  "use strict";
  if (customElements.get("live-video")) return;

  const START_SECONDS = 0.25; // of video that must be there before playing begins
  const APPEND_BYTES = 1 << 20; // small enough for the buffers of phones
  const KEPT_SECONDS = 2; // of what was played, when the browser's buffer is full
  const FULL_MS = 250;
  const LOST = "The connection was lost";
  const EARLY_SECONDS = 1;
  const RETRY_SECONDS = [0.5, 1, 2, 4, 8, 8, 8];
  const STATUS_MS = 400; // counts change often; a screen reader would read every one
  const ADOPT_MS = 1000; // how long a removed player waits for a new element with its address
  const STYLE = new URL("player.css", document.currentScript?.src ?? document.baseURI).href;

  // ---- bytes -------------------------------------------------------------------------------------------------------

  /** What the server refuses in words: trying again would not help. */
  class Refused extends Error {}

  /** There is nothing to send yet. */
  class TooEarly extends Error {}

  const sleep = (seconds, signal) =>
    new Promise((resolve) => {
      const timer = setTimeout(resolve, seconds * 1000);
      signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
    });

  async function sentence(answer) {
    const plain = (answer.headers.get("content-type") ?? "").startsWith("text/plain");
    const text = plain ? (await answer.text()).trim() : "";
    return text && text.length < 300 ? text : `The server answered with code ${answer.status}.`;
  }

  /** One answer of the server as chunks, from byte `from` on. */
  async function* oneAnswer(url, from, signal) {
    const address = new URL(url, document.baseURI);
    if (from) address.searchParams.set("from", from);
    const answer = await fetch(address, { signal, cache: "no-store" });
    if (answer.status === 202) throw new TooEarly(await sentence(answer));
    if (answer.status >= 400 && answer.status < 500) throw new Refused(await sentence(answer));
    if (!answer.ok) throw new Error(await sentence(answer));
    const reader = answer.body.getReader();
    try {
      for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  /** The growing file from its beginning to its end, across lost connections. tell(text): why nothing comes. */
  async function* growingFile(url, signal, tell) {
    let received = 0;
    let failures = 0;
    while (!signal.aborted) {
      try {
        for await (const bytes of oneAnswer(url, received, signal)) {
          received += bytes.length;
          failures = 0;
          yield bytes;
        }
        return;
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused) throw error;
        if (error instanceof TooEarly) failures = 0;
        if (failures === RETRY_SECONDS.length) throw new Error(`${LOST} (${error.message}). Reload the page.`);
        tell(error instanceof TooEarly ? error.message : `${LOST}, trying again`);
        await sleep(error instanceof TooEarly ? EARLY_SECONDS : RETRY_SECONDS[failures++], signal);
      }
    }
  }

  // ---- mp4 ---------------------------------------------------------------------------------------------------------

  const joined = (parts) => {
    const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
    parts.reduce((at, part) => (whole.set(part, at), at + part.length), 0);
    return whole;
  };

  const nameAt = (bytes, at) => String.fromCharCode(...bytes.subarray(at, at + 4));

  /** The whole top-level box of this name, or null while it has not arrived. */
  function topBox(bytes, name) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    for (let at = 0; at + 8 <= bytes.length; ) {
      const size = view.getUint32(at);
      if (size < 8) throw new Error("The live video is no mp4 that this player knows.");
      if (nameAt(bytes, at + 4) === name) return at + size <= bytes.length ? bytes.subarray(at, at + size) : null;
      at += size;
    }
    return null;
  }

  /** MIME type with the codec that the file itself names (profile, constraints and level from its avcC box). */
  function typeOf(moov) {
    for (let at = 8; at + 8 <= moov.length; at++) {
      if (nameAt(moov, at) !== "avcC") continue;
      const hex = [...moov.subarray(at + 5, at + 8)].map((byte) => byte.toString(16).padStart(2, "0"));
      return `video/mp4; codecs="avc1.${hex.join("")}"`;
    }
    throw new Error("The live video is not H.264, so this player can't play it.");
  }

  // ---- Media Source ------------------------------------------------------------------------------------------------

  const SourceKind = window.MediaSource ?? window.ManagedMediaSource; // an iPhone has only the second

  /** Appends to a <video>, one piece after the other. onChange: after each; onError: what the browser refuses. */
  class Appender {
    constructor(video, signal, onChange, onError) {
      Object.assign(this, { video, signal, onChange, onError, queue: [], buffer: null, over: false });
      this.source = new SourceKind();
      this.address = URL.createObjectURL(this.source);
      const once = { once: true, signal };
      this.opened = new Promise((resolve) => this.source.addEventListener("sourceopen", resolve, once));
      this.opened.then(() => this.release());
      signal.addEventListener("abort", () => this.release(), { once: true });
      if (SourceKind !== window.MediaSource) video.disableRemotePlayback = true; // else it would never open
      video.src = this.address;
    }

    /** The <video> holds the source by now; the address would keep it in memory. */
    release() {
      URL.revokeObjectURL(this.address);
    }

    async start(type, seconds) {
      await this.opened;
      if (this.signal.aborted) return;
      if (!SourceKind.isTypeSupported(type)) throw new Error(`This browser can't play ${type}.`);
      this.buffer = this.source.addSourceBuffer(type);
      if (seconds) this.source.duration = seconds; // the time line is then whole from the start
      this.buffer.addEventListener("updateend", () => (this.pump(), this.onChange()), { signal: this.signal });
    }

    push(bytes) {
      if (this.over) return;
      this.queue.push(bytes);
      this.pump();
    }

    /** No more comes. The duration becomes that of what is there. */
    end() {
      this.over = true;
      this.pump();
    }

    get ended() {
      return this.source.readyState === "ended";
    }

    get endSeconds() {
      const ranges = this.buffer?.buffered;
      return ranges?.length ? ranges.end(ranges.length - 1) : 0;
    }

    pump() {
      if (!this.buffer || this.buffer.updating || this.source.readyState !== "open") return;
      if (!this.queue.length) return this.over && this.source.endOfStream();
      const bytes = joined(this.queue);
      try {
        this.buffer.appendBuffer(bytes.subarray(0, APPEND_BYTES));
        this.queue = bytes.length > APPEND_BYTES ? [bytes.subarray(APPEND_BYTES)] : [];
      } catch (error) {
        this.queue = [bytes];
        if (error.name === "QuotaExceededError") this.makeRoom();
        else this.onError(error);
      }
    }

    /** The browser holds no more: drop what was played. If that is nothing yet, try again while it plays on. */
    makeRoom() {
      setTimeout(() => this.signal.aborted || this.pump(), FULL_MS);
      const until = this.video.currentTime - KEPT_SECONDS;
      const ranges = this.buffer.buffered;
      if (ranges.length && ranges.start(0) < until) this.buffer.remove(0, until);
    }
  }

  // ---- player ------------------------------------------------------------------------------------------------------

  const MEDIA_ERRORS = ["", "was stopped", "could not be loaded", "could not be decoded", "is of a kind it can't play"];

  /** An empty address would mean the page itself. */
  const setPoster = (video, address) =>
    address ? video.setAttribute("poster", address) : video.removeAttribute("poster");

  /** One run on one <video>. Everything it adds is taken away again by stop(). */
  class LivePlayer {
    constructor(video, status, { url, finalUrl, fps = 24, totalFrames = 0, mimeType = "" }) {
      Object.assign(this, { video, status, url, finalUrl, fps, totalFrames, mimeType });
      this.controller = new AbortController();
      this.signal = this.controller.signal;
      this.available = 0; // frames that can be played by now
      this.complete = false; // no more frames come
      this.onFinal = false; // the final file is in the <video>
      this.failed = false;
      this.wanted = Boolean(url); // to play: false once the user pressed pause, and for a file of the past
      this.note = ""; // what stands in the way, in words
      this.appender = null;
      video.muted = true;
      video.playsInline = true;
      this.listen();
      this.begin();
    }

    listen() {
      const options = { signal: this.signal };
      const on = (names, action) => names.forEach((name) => this.video.addEventListener(name, action, options));
      on(["play"], () => (this.wanted = true));
      on(["pause"], () => this.paused());
      on(["ended"], () => this.maybeSwap());
      on(["waiting", "playing", "pause", "ended", "seeked", "loadeddata"], () => this.show(true));
      on(["timeupdate", "durationchange"], () => this.show());
      on(["error"], () => this.video.error && this.fail(this.mediaError()));
      document.addEventListener("visibilitychange", () => document.hidden || !this.available || this.play(), options);
      // Caught on the way down: Chromium's own controls listen on the <video> and would toggle a second time.
      const keys = (event) => event.composedPath()[0] === this.video && this.key(event);
      ["keydown", "keyup"].forEach((name) => window.addEventListener(name, keys, { ...options, capture: true }));
    }

    begin() {
      if (this.finalUrl) return this.loadFinal();
      if (!this.url) return this.show(true);
      if (SourceKind) return void this.follow();
      this.say("This browser can't play a video while it grows. It will appear here once it is whole.");
    }

    /** Follow the growing file to its end. */
    async follow() {
      this.appender = new Appender(this.video, this.signal, () => this.grown(), (error) => this.fail(error.message));
      const signal = this.signal;
      let head = [];
      try {
        for await (const bytes of growingFile(this.url, this.signal, (text) => this.say(text))) {
          this.note = "";
          if (head) head = await this.begun([...head, bytes]);
          else this.appender.push(bytes);
          if (this.complete) break;
        }
        if (head?.length) throw new Error("The live video ended before its first frame.");
        this.appender?.end();
        this.grown();
      } catch (error) {
        if (!signal.aborted) this.fail(error.message);
      }
    }

    /** Start the buffer once the file's header is there; returns what still waits for it, null when it has begun. */
    async begun(parts) {
      const bytes = joined(parts);
      const moov = topBox(bytes, "moov");
      if (!moov) return [bytes];
      await this.appender.start(this.mimeType || typeOf(moov), this.totalFrames / this.fps);
      this.appender.push(bytes);
      return null;
    }

    say(text) {
      this.note = text;
      this.show(true);
    }

    /** More is there than before. */
    grown() {
      if (!this.appender || this.failed) return;
      this.available = Math.round(this.appender.endSeconds * this.fps);
      // The last frame is there: no need to wait until the server closes the connection.
      if (this.totalFrames && this.available >= this.totalFrames) this.appender.end();
      this.complete = this.appender.ended;
      const ahead = this.appender.endSeconds - this.video.currentTime;
      if (this.complete || ahead >= START_SECONDS) this.play();
      if (this.complete) this.maybeSwap();
      this.show(this.complete);
    }

    play() {
      if (!this.wanted || !this.video.paused || this.video.ended || !this.video.isConnected) return;
      this.video.play().catch((error) => {
        if (error.name !== "NotAllowedError") return;
        this.wanted = false;
        this.show(true);
      });
    }

    paused() {
      // The end pauses too, and so may leaving the page or hiding it: none of them is a wish of the user.
      if (!this.video.isConnected || this.video.ended || document.hidden) return;
      this.wanted = false;
      this.maybeSwap();
    }

    mediaError() {
      const { code, message } = this.video.error;
      return `This browser reports that the video ${MEDIA_ERRORS[code] ?? "failed"}${message ? ` (${message})` : ""}.`;
    }

    fail(text) {
      if (this.finalUrl && !this.onFinal) return this.loadFinal();
      if (this.failed) return;
      this.failed = true;
      this.complete = true;
      this.appender?.end(); // what is there can still be played
      this.say(text);
    }

    // -- the final file

    /** The whole file exists now. A running playback goes on; the file takes over when it pauses or ends. */
    setFinal(url) {
      if (url === this.finalUrl) return;
      this.finalUrl = url;
      if (!url || this.onFinal) return;
      if (this.failed || !this.appender || !this.available) this.loadFinal();
      else this.maybeSwap();
    }

    async maybeSwap() {
      if (this.onFinal || this.checking || !this.finalUrl || !this.complete || !this.rests()) return;
      this.checking = true;
      const there = await this.finalIsThere();
      this.checking = false;
      if (there && this.rests() && !this.onFinal && !this.signal.aborted) this.swap();
    }

    rests() {
      return this.video.paused || this.video.ended;
    }

    async finalIsThere() {
      try {
        const options = { headers: { Range: "bytes=0-0" }, signal: this.signal };
        const answer = await fetch(this.finalUrl, options);
        await answer.body?.cancel();
        return answer.ok;
      } catch {
        return false;
      }
    }

    /** Same place, better file. The picture of the moment covers the gap. */
    swap() {
      const { ended, currentTime } = this.video;
      const before = this.video.getAttribute("poster");
      setPoster(this.video, this.snapshot() || before);
      this.loadFinal(currentTime);
      const options = { once: true, signal: this.signal };
      this.swapping = true; // the <video> is back at zero for a moment, which is no news
      const place = () => (this.video.currentTime = ended ? this.video.duration : currentTime);
      this.video.addEventListener("loadedmetadata", place, options);
      this.video.addEventListener("seeked", () => this.swapped(before), options);
    }

    swapped(poster) {
      this.swapping = false;
      setPoster(this.video, poster);
      this.show(true);
    }

    snapshot() {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [this.video.videoWidth, this.video.videoHeight];
      if (!canvas.width) return "";
      canvas.getContext("2d").drawImage(this.video, 0, 0);
      return canvas.toDataURL("image/jpeg", 0.9);
    }

    loadFinal(at = null) {
      if (this.appender) this.restart();
      Object.assign(this, { onFinal: true, complete: true, failed: false, note: "" });
      this.available = this.totalFrames;
      // The fragment makes the browser open the file at this place, so frame 0 does not flash up.
      this.video.src = at === null ? this.finalUrl : `${this.finalUrl}#t=${at.toFixed(3)}`;
      if (at === null) this.video.addEventListener("canplay", () => this.play(), { once: true, signal: this.signal });
      this.show(true);
    }

    /** End what belongs to the growing file; the <video> stays. */
    restart() {
      this.controller.abort();
      this.controller = new AbortController();
      this.signal = this.controller.signal;
      this.appender = null;
      this.listen();
    }

    // -- keys and words

    /** Space plays and pauses; the arrows step by one frame while it is paused. */
    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key !== " " && !(step && this.video.paused)) return;
      event.preventDefault();
      event.stopPropagation();
      if (event.type === "keyup" || (event.repeat && !step)) return;
      if (step) this.step(step);
      else if (this.video.paused) this.video.play().catch(() => {});
      else this.video.pause();
    }

    step(frames) {
      const last = Math.max(0, this.shown - 1);
      const next = Math.min(last, Math.max(0, this.frame + frames));
      this.video.currentTime = (next + 0.5) / this.fps; // the middle of the frame: rounding can't reach its neighbour
    }

    /** Index of the frame on the screen. */
    get frame() {
      const last = Math.max(0, this.shown - 1);
      return Math.min(last, Math.floor(this.video.currentTime * this.fps + 0.01));
    }

    /** Frames that can be shown. */
    get shown() {
      if (this.onFinal && this.video.duration) return Math.round(this.video.duration * this.fps);
      return this.available;
    }

    get state() {
      const { paused, ended, readyState } = this.video;
      if (this.failed) return "error";
      if (!this.shown) return "empty";
      if (this.complete && ended) return "ended";
      if (paused && !ended) return "paused";
      return !this.complete && readyState < HTMLMediaElement.HAVE_FUTURE_DATA ? "waiting" : "playing";
    }

    words(state) {
      const count = this.totalFrames ? `${this.shown} of ${this.totalFrames} frames` : `${this.shown} frames`;
      const missing = this.complete && this.totalFrames && this.shown < this.totalFrames;
      const whole = missing ? `Stopped early: ${count}` : `${this.shown} frames`;
      const length = `${whole}, ${(this.shown / this.fps).toFixed(1)} s`;
      const place = `Frame ${this.frame + 1} of ${this.complete ? this.shown : this.totalFrames || "?"}`;
      if (state === "error") return this.note;
      if (this.note) return this.shown ? `${this.note}: ${count}` : this.note;
      if (state === "empty") return this.url || this.finalUrl ? "Waiting for the first frames" : "";
      if (state === "waiting") return `Waiting for the decoder: ${count}`;
      if (state === "paused" && this.video.currentTime) return this.complete ? place : `${place}: ${count} are decoded`;
      if (state === "paused") return `Press play: ${this.complete ? length : count}`;
      return this.complete ? length : `Playing while it is decoded: ${count}`;
    }

    /** Write the status. now: the state may have changed; otherwise counts are written a few times a second. */
    show(now = false) {
      clearTimeout(this.timer);
      if (this.swapping && !this.failed) return;
      const state = this.state;
      if (!now && state === this.status.dataset.state && performance.now() - (this.written ?? 0) < STATUS_MS) {
        this.timer = setTimeout(() => this.show(true), STATUS_MS);
        return;
      }
      this.written = performance.now();
      const text = this.words(state);
      if (this.status.textContent !== text) this.status.textContent = text;
      this.status.dataset.state = state;
      const detail = { state, available: this.shown, total: this.totalFrames };
      this.video.dispatchEvent(new CustomEvent("liveprogress", { detail, bubbles: true, composed: true }));
    }

    /** Let go of everything: the connection, the buffer, the listeners. */
    stop() {
      this.controller.abort();
      clearTimeout(this.timer);
      this.video.removeAttribute("src");
      this.video.load();
    }
  }

  const attachLivePlayer = (video, status, options) => new LivePlayer(video, status, options);

  // ---- element -----------------------------------------------------------------------------------------------------

  const TEMPLATE = document.createElement("template");
  TEMPLATE.innerHTML = `
    <link rel="stylesheet">
    <div class="screen">
      <video controls muted playsinline preload="auto" tabindex="0" aria-describedby="status"
             aria-keyshortcuts="Space ArrowLeft ArrowRight"></video>
    </div>
    <progress max="1" value="0" aria-label="Frames decoded"></progress>
    <p id="status" role="status"></p>`;

  const started = new Set(); // elements that have a player

  class LiveVideo extends HTMLElement {
    static observedAttributes = ["src", "final", "frames", "fps", "width", "height", "poster", "label"];

    constructor() {
      super();
      // A shadow root: gr.HTML compares and removes ordinary children, and the page's style stays outside.
      this.attachShadow({ mode: "open" }).append(TEMPLATE.content.cloneNode(true));
      this.find("link").href = STYLE;
      this.find(".screen").addEventListener("liveprogress", ({ detail }) => this.progressed(detail));
      this.player = null;
      this.playing = null; // the attributes that the player was started with
    }

    find(selector) {
      return this.shadowRoot.querySelector(selector);
    }

    connectedCallback() {
      clearTimeout(this.leaving);
      this.adopt();
      const going = this.player;
      this.update();
      if (going && going === this.player) going.play(); // moving a <video> pauses it
    }

    disconnectedCallback() {
      this.leaving = setTimeout(() => this.leave(), ADOPT_MS);
    }

    attributeChangedCallback() {
      // Several attributes change together; a player started between two of them would start twice.
      if (!this.isConnected || this.pending) return;
      this.pending = true;
      queueMicrotask(() => ((this.pending = false), this.isConnected && this.update()));
    }

    leave() {
      started.delete(this);
      this.player?.stop();
      this.player = this.playing = null;
    }

    /** Take over the player of an element that the page has just replaced by this one, so that it goes on. */
    adopt() {
      const src = this.getAttribute("src");
      // Not left to disconnectedCallback: browsers may call it after the connectedCallback of the new element.
      const other = [...started].find((one) => !one.isConnected && one.playing.src === src);
      if (!src || !other || this.player) return;
      started.delete(other);
      started.add(this);
      for (const name of ["video", "progress", "#status"]) {
        const [mine, theirs] = [this.find(name), other.find(name)];
        const place = document.createComment("");
        theirs.replaceWith(place);
        mine.replaceWith(theirs);
        place.replaceWith(mine);
      }
      [this.player, this.playing, other.player, other.playing] = [other.player, other.playing, null, null];
    }

    update() {
      const read = (name) => this.getAttribute(name) ?? "";
      const now = { src: read("src"), final: read("final"), frames: Number(read("frames")), fps: Number(read("fps")) };
      const video = this.find("video");
      video.setAttribute("aria-label", read("label") || "Video, played while it is decoded");
      setPoster(video, read("poster"));
      const [width, height] = [Number(read("width")), Number(read("height"))];
      this.find(".screen").style.aspectRatio = width && height ? `${width} / ${height}` : "";
      this.start(now, video);
    }

    start(now, video) {
      const old = this.playing;
      this.playing = now;
      if (old && old.src === now.src && (now.src || old.final === now.final)) {
        Object.assign(this.player, { totalFrames: now.frames, fps: now.fps || 24 });
        this.player.setFinal(now.final);
        return;
      }
      this.player?.stop();
      started.add(this);
      const options = { url: now.src, finalUrl: now.final, fps: now.fps || 24, totalFrames: now.frames };
      this.player = attachLivePlayer(video, this.find("#status"), options);
    }

    progressed({ state, available, total }) {
      const bar = this.find("progress");
      bar.hidden = !total || state === "error" || available >= total;
      bar.max = total || 1;
      bar.value = available;
    }
  }

  customElements.define("live-video", LiveVideo);
  window.attachLivePlayer = attachLivePlayer;
})();
