// Several videos on one clock.
//
//   const clock = new VideoClock(videos, fps, frames, changed);
//   clock.play(); clock.pause(); clock.seek(frame); clock.setSpeed(0.5); clock.stop();
//
// A classic script and not a module: gr.HTML's `head` drops the type of the scripts that it inserts.
(() => {
  "use strict";

  const NUDGE = 0.25; // how much faster or slower a follower may run to catch up
  const JUMP_FRAMES = 4; // farther apart than this, it seeks instead

  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  /** Plays several videos as one. The first leads; the others follow it by running a little faster or slower. */
  class VideoClock {
    constructor(videos, fps, frames, changed) {
      Object.assign(this, { videos, fps, frames, changed, speed: 1, loop: true, wanted: false });
      for (const video of videos) video.addEventListener("error", changed);
      this.lead.addEventListener("ended", () => this.ended());
      this.lead.addEventListener("loadeddata", changed);
    }

    get lead() {
      return this.videos[0];
    }

    get playing() {
      return this.wanted;
    }

    get frame() {
      return clamp(Math.floor(this.lead.currentTime * this.fps + 0.01), 0, this.frames - 1);
    }

    async play() {
      if (this.wanted) return;
      this.wanted = true;
      if (this.lead.ended || this.frame === this.frames - 1) await this.place(0);
      this.setSpeed(this.speed);
      await Promise.all(this.videos.map((video) => video.play().catch(() => {})));
      if (this.lead.paused && !this.lead.ended) this.wanted = false;
      this.follow();
      this.changed();
    }

    /** Stop, everything on the frame of the leader. */
    pause() {
      this.wanted = false;
      this.videos.forEach((video) => video.pause());
      return this.place(this.frame);
    }

    /** Stop and show a frame. */
    seek(frame) {
      this.wanted = false;
      this.videos.forEach((video) => video.pause());
      return this.place(frame);
    }

    /** To the middle of a frame, so that rounding can't reach its neighbour; resolves when all are there. */
    async place(frame) {
      const time = (clamp(frame, 0, this.frames - 1) + 0.5) / this.fps;
      const there = this.videos.map(
        (video) => new Promise((done) => video.addEventListener("seeked", done, { once: true })),
      );
      this.videos.forEach((video) => (video.currentTime = time));
      this.changed();
      await Promise.all(there);
      this.changed();
    }

    setSpeed(speed) {
      this.speed = speed;
      this.videos.forEach((video) => (video.playbackRate = speed));
    }

    async ended() {
      if (!this.wanted) return;
      this.wanted = false;
      this.videos.forEach((video) => video.pause());
      await this.place(this.loop ? 0 : this.frames - 1);
      if (this.loop) this.play();
    }

    follow() {
      if (!this.wanted) return;
      const now = this.lead.currentTime;
      for (const video of this.videos.slice(1)) {
        const ahead = video.currentTime - now;
        if (Math.abs(ahead) * this.fps > JUMP_FRAMES && !video.seeking) video.currentTime = now;
        else video.playbackRate = this.speed * (1 - clamp(ahead * 4, -NUDGE, NUDGE));
        if (video.paused && !video.ended && !this.lead.paused) video.play().catch(() => {});
      }
      this.changed();
      requestAnimationFrame(() => this.follow());
    }

    stop() {
      this.wanted = false;
      for (const video of this.videos) {
        video.removeAttribute("src");
        video.load();
      }
    }
  }

  window.VideoClock = VideoClock;
})();
