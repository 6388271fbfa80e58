"use strict";
// Draws the timelines and flows of one page from the data that stands in it. Text from the data is only ever drawn on a
// canvas or set as textContent: it cannot become markup. Nothing is fetched.
(() => {
  const ROW = 20, LEFT = 170, TOP = 22, LEAST_NS = 50;
  const ink = () => getComputedStyle(document.body).color;
  const dataOf = (stage) => JSON.parse(stage.querySelector("script[type='application/json']").textContent);
  const colour = (number) => `hsl(${(number * 137.508) % 360} 55% 62%)`;
  const asked = new URLSearchParams(location.hash.slice(1)); // #timeline0=from..to (ns) and #flow0=step

  function duration(ns) {
    for (const [unit, scale] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (Math.abs(ns) >= scale) return `${Number((ns / scale).toPrecision(4))} ${unit}`;
    }
    return `${Math.round(ns)} ns`;
  }

  function fitted(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || 900;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    return [pen, width];
  }

  const timelines = [];

  class Timeline {
    constructor(stage, number) {
      this.stage = stage;
      this.data = dataOf(stage);
      this.canvas = stage.querySelector("canvas");
      this.tip = stage.querySelector(".tip");
      this.end = this.data.end;
      [this.from, this.to] = [0, this.end];
      const wanted = /^(\d+)\.\.(\d+)$/.exec(asked.get(`timeline${number}`) || "");
      if (wanted) this.view(Number(wanted[1]), Number(wanted[2]));
      this.canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        this.zoom(this.at(event.offsetX), Math.exp(event.deltaY * 0.0015));
      }, { passive: false });
      this.canvas.addEventListener("pointerdown", (event) => {
        this.canvas.setPointerCapture(event.pointerId);
        this.grip = { x: event.offsetX, from: this.from, to: this.to };
      });
      for (const ends of ["pointerup", "pointercancel"]) this.canvas.addEventListener(ends, () => { this.grip = null; });
      this.canvas.addEventListener("pointermove", (event) => this.moved(event));
      this.canvas.addEventListener("pointerleave", () => { this.tip.style.display = "none"; });
      this.canvas.addEventListener("dblclick", () => this.view(0, this.end));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
    }

    get wide() { return Math.max(1, (this.canvas.clientWidth || 900) - LEFT); }
    at(x) { return this.from + (x - LEFT) / this.wide * (this.to - this.from); }
    place(ns) { return LEFT + (ns - this.from) / (this.to - this.from) * this.wide; }

    view(from, to) {
      const length = Math.min(Math.max(to - from, LEAST_NS), Math.max(this.end, LEAST_NS));
      this.from = Math.min(Math.max(0, from), Math.max(0, this.end - length));
      this.to = this.from + length;
      this.draw();
      if (document.getElementById("together")?.checked) {
        for (const other of timelines) {
          if (other !== this) { [other.from, other.to] = [this.from, this.to]; other.draw(); }
        }
      }
    }

    zoom(around, factor) {
      this.view(around - (around - this.from) * factor, around + (this.to - around) * factor);
    }

    key(event) {
      const length = this.to - this.from, middle = (this.from + this.to) / 2;
      const does = {
        ArrowLeft: () => this.view(this.from - length / 5, this.to - length / 5),
        ArrowRight: () => this.view(this.from + length / 5, this.to + length / 5),
        "+": () => this.zoom(middle, 0.6), "=": () => this.zoom(middle, 0.6), "-": () => this.zoom(middle, 1 / 0.6),
        0: () => this.view(0, this.end),
      }[event.key];
      if (does) { event.preventDefault(); does(); }
    }

    moved(event) {
      if (this.grip) {
        const shift = (event.offsetX - this.grip.x) / this.wide * (this.grip.to - this.grip.from);
        this.view(this.grip.from - shift, this.grip.to - shift);
        return;
      }
      const row = Math.floor((event.offsetY - TOP) / ROW), ns = this.at(event.offsetX);
      const slack = (this.to - this.from) / this.wide * 2;
      let best = -1;
      this.data.events.forEach(([on, start, length], number) => {
        if (on === row && ns >= start - slack && ns <= start + length + slack) best = number;
      });
      this.tip.style.display = best < 0 ? "none" : "block";
      if (best < 0) return;
      const [on, start, length, name, details] = this.data.events[best];
      const more = details < 0 ? "" : `\n${this.data.details[details]}`;
      this.tip.textContent =
        `${this.data.names[name]}\n${this.data.rows[on]}\nfrom ${duration(start)}, ${duration(length)}${more}`;
      this.tip.style.left = `${Math.min(event.offsetX + 12, this.wide - 120)}px`;
      this.tip.style.top = `${event.offsetY + 16}px`;
    }

    draw() {
      const height = TOP + this.data.rows.length * ROW + 4, [pen, width] = fitted(this.canvas, height), text = ink();
      pen.fillStyle = text;
      const step = 10 ** Math.floor(Math.log10((this.to - this.from) / 4));
      for (const wide of [1, 2, 5]) {
        if ((this.to - this.from) / (step * wide) > 8) continue;
        for (let ns = Math.ceil(this.from / (step * wide)) * step * wide; ns <= this.to; ns += step * wide) {
          pen.globalAlpha = 0.15;
          pen.fillRect(this.place(ns), TOP - 6, 1, height);
          pen.globalAlpha = 0.8;
          pen.fillText(duration(ns), this.place(ns) + 3, 12);
        }
        break;
      }
      pen.globalAlpha = 1;
      let drawn = 0;
      for (const [on, start, length, name] of this.data.events) {
        const x = Math.max(LEFT, this.place(start)), end = Math.min(width, this.place(start + length));
        if (end < LEFT || x > width || start > this.to || start + length < this.from) continue;
        drawn += 1;
        pen.fillStyle = colour(name);
        pen.fillRect(x, TOP + on * ROW + 2, Math.max(1, end - x), ROW - 4);
        if (end - x > 44) {
          pen.save();
          pen.beginPath();
          pen.rect(x, TOP + on * ROW, end - x - 2, ROW);
          pen.clip();
          pen.fillStyle = "#111";
          pen.fillText(this.data.names[name], x + 3, TOP + on * ROW + 14);
          pen.restore();
        }
      }
      pen.fillStyle = text;
      this.data.rows.forEach((label, row) => pen.fillText(label.slice(0, 26), 4, TOP + row * ROW + 14));
      Object.assign(this.stage.dataset, { drawn, from: Math.round(this.from), to: Math.round(this.to) });
    }
  }

  class Flow {
    constructor(stage, number) {
      this.stage = stage;
      this.data = dataOf(stage);
      this.canvas = stage.querySelector("canvas");
      this.slider = stage.querySelector("input");
      this.button = stage.querySelector("button");
      this.words = stage.querySelector(".said");
      this.slider.max = Math.max(0, this.data.steps - 1);
      this.slider.value = asked.get(`flow${number}`) || 0;
      this.phase = 1;
      this.slider.addEventListener("input", () => { this.phase = 1; this.draw(); });
      this.button.addEventListener("click", () => (this.playing ? this.stop() : this.play()));
    }

    play() {
      if (Number(this.slider.value) >= Number(this.slider.max)) this.slider.value = 0;
      this.playing = true;
      this.button.textContent = "pause";
      this.phase = 0;
      let last = performance.now();
      const turn = (now) => {
        if (!this.playing) return;
        this.phase += (now - last) / 900;
        last = now;
        if (this.phase >= 1) {
          if (Number(this.slider.value) >= Number(this.slider.max)) { this.phase = 1; this.stop(); this.draw(); return; }
          this.slider.value = Number(this.slider.value) + 1;
          this.phase = 0;
        }
        this.draw();
        requestAnimationFrame(turn);
      };
      requestAnimationFrame(turn);
    }

    stop() { this.playing = false; this.button.textContent = "play"; }

    draw() {
      const ranks = this.data.ranks, height = 420, [pen, width] = fitted(this.canvas, height), text = ink();
      const middle = [width / 2, height / 2], round = Math.min(width, height) / 2 - 34;
      const seat = (rank) => {
        const turn = rank / ranks * 2 * Math.PI - Math.PI / 2;
        return [middle[0] + round * Math.cos(turn), middle[1] + round * Math.sin(turn)];
      };
      const step = Number(this.slider.value), moves = this.data.moves.filter((move) => move[0] === step);
      for (const [, from, to, chunk, sums] of moves) {
        const [a, b] = [seat(from), seat(to)];
        pen.strokeStyle = pen.fillStyle = colour(chunk);
        pen.lineWidth = sums > 1 ? 2.5 : 1.2;
        pen.beginPath();
        if (from === to) { pen.arc(...a, 17 + 4 * this.phase, 0, 7); pen.stroke(); continue; }
        pen.moveTo(...a);
        pen.lineTo(...b);
        pen.globalAlpha = 0.4;
        pen.stroke();
        pen.globalAlpha = 1;
        pen.beginPath();
        pen.arc(a[0] + (b[0] - a[0]) * this.phase, a[1] + (b[1] - a[1]) * this.phase, 6, 0, 7);
        pen.fill();
      }
      pen.textAlign = "center";
      for (let rank = 0; rank < ranks; rank += 1) {
        const [x, y] = seat(rank);
        pen.beginPath();
        pen.arc(x, y, ranks > 32 ? 5 : 13, 0, 7);
        pen.fillStyle = "#d0d5dd";
        pen.fill();
        pen.fillStyle = ranks > 32 ? text : "#111";
        if (ranks <= 32) pen.fillText(String(rank), x, y + 4);
      }
      this.words.textContent = `step ${step + 1} of ${this.data.steps}: ${moves.length} moves`;
      Object.assign(this.stage.dataset, { step, moves: moves.length });
    }
  }

  const flows = [...document.querySelectorAll("[data-kind=flow]")].map((stage, number) => new Flow(stage, number));
  timelines.push(...[...document.querySelectorAll("[data-kind=timeline]")].map((stage, number) => new Timeline(stage, number)));
  const drawAll = () => [...timelines, ...flows].forEach((one) => one.draw());
  window.addEventListener("resize", drawAll);
  drawAll();
  document.documentElement.dataset.ready = "yes";
})();
