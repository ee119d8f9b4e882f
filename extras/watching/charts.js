"use strict";
// Curves as SVG and layers as a canvas, over one axis that all charts of the page share.

const HEIGHT = 210,
  LEFT = 58,
  RIGHT = 10,
  TOP = 8,
  BOTTOM = 22;

// --- what both kinds of charts do ---------------------------------------------------------------

// `shared` has domain [low, high], ticks(count), label(x), hover(chart, x, event), zoom(low, high).
class Chart {
  constructor(spec, shared) {
    this.spec = spec;
    this.shared = shared;
    this.legend = el("div", { className: "legend" });
    this.title = el("h2");
    this.node = el(
      "figure",
      { className: "chart", id: `chart-${spec.id}` },
      this.title,
      this.legend,
    );
  }

  name(title, unit) {
    this.title.replaceChildren(title, ...(unit ? [el("small", {}, ` ${unit}`)] : []));
  }

  x(value) {
    const [low, high] = this.shared.domain;
    return LEFT + (this.width - LEFT - RIGHT) * (high > low ? (value - low) / (high - low) : 0.5);
  }

  inverse(place) {
    const [low, high] = this.shared.domain;
    return low + ((high - low) * (place - LEFT)) / (this.width - LEFT - RIGHT);
  }

  size() {
    this.width = Math.max(220, this.node.clientWidth - 24);
    return this.width;
  }

  frame() {
    const parts = [],
      bottom = HEIGHT - BOTTOM;
    const count = Math.max(4, Math.floor(this.width / 65));
    for (const tick of this.shared.ticks(count)) {
      const x = this.x(tick),
        text = this.shared.label(tick);
      const end = x + 3.2 * text.length > this.width;
      parts.push(
        svg("line", { class: "edge", x1: x, x2: x, y1: bottom, y2: bottom + 4 }),
        svg("text", { x, y: HEIGHT - 6, "text-anchor": end ? "end" : "middle" }, text),
      );
    }
    parts.push(
      svg("line", { class: "edge", x1: LEFT, x2: this.width - RIGHT, y1: bottom, y2: bottom }),
    );
    return parts;
  }

  // Pointer: a line with values in all charts; a drag zooms.
  listen(surface) {
    let from = null;
    const place = event => {
      const x = event.clientX - surface.getBoundingClientRect().left;
      return Math.min(this.width - RIGHT, Math.max(LEFT, (x * this.width) / surface.clientWidth));
    };
    surface.onpointerdown = event => {
      if (event.pointerType === "mouse" && event.button === 0) from = place(event);
      this.shared.hover(this, this.inverse(place(event)), event);
    };
    surface.onpointermove = event => {
      const at = place(event);
      this.brush(from === null ? null : [Math.min(from, at), Math.max(from, at)]);
      this.shared.hover(this, this.inverse(at), event);
    };
    surface.onpointerup = event => {
      const at = place(event);
      if (from !== null && Math.abs(at - from) > 8)
        this.shared.zoom(...[this.inverse(from), this.inverse(at)].sort((a, b) => a - b));
      from = null;
      this.brush(null);
    };
    surface.onpointerleave = event => {
      if (event.pointerType === "touch") return; // the values stay until another place is touched
      from = null;
      this.brush(null);
      this.shared.hover(null);
    };
    surface.ondblclick = () => this.shared.zoom(null);
  }

  brush(range) {
    if (!this.over) return;
    this.shade.setAttribute("x", range ? range[0] : 0);
    this.shade.setAttribute("width", range ? range[1] - range[0] : 0);
  }

  overlay() {
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
    this.shade = svg("rect", { class: "brush", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0 });
    this.over = svg("g", {}, this.shade, this.cross);
    return this.over;
  }

  // One of a kind for a few pixels.
  marks(all) {
    const places = {};
    return all
      .filter(({ x, kind }) => {
        const free = !(Math.abs(this.x(x) - places[kind]) < 4);
        if (free) places[kind] = this.x(x);
        return free;
      })
      .map(mark => this.mark(mark));
  }

  mark({ x, kind, text }) {
    const at = this.x(x),
      bottom = HEIGHT - BOTTOM;
    const shape =
      kind === "checkpoint"
        ? svg("path", { d: `M${at} ${bottom - 7}l4 7h-8z` })
        : svg("line", { x1: at, x2: at, y1: TOP, y2: bottom });
    shape.setAttribute("class", `mark ${kind === "phase" ? "phase-mark" : kind}`);
    shape.append(svg("title", {}, text));
    return shape;
  }

  point(x) {
    if (!this.cross) return;
    const at = x === null ? -9 : this.x(x);
    this.cross.setAttribute("x1", at);
    this.cross.setAttribute("x2", at);
  }
}

// --- curves -------------------------------------------------------------------------------------

// A curve: label, colour (0 to 7), dash, dots (every value is marked), newest, and for its points
// step, x, mean, low, high, and `cuts`: indices at which a launch or a phase begins.
class Curves extends Chart {
  draw(curves, marks, smooth) {
    this.curves = curves;
    const width = this.size(),
      spec = this.spec,
      bottom = HEIGHT - BOTTOM;
    const said = spec.percent ? percent : number;
    const [first, last] = this.shared.domain;
    for (const curve of curves) {
      const window = smooth && spec.smooth && !curve.dots ? smoothing(curve.mean.length) : 1;
      curve.line = window > 1 ? centred(curve.mean, window, curve.cuts) : curve.mean;
      curve.window = window;
    }
    const values = curves.flatMap(c =>
      [...c.mean, ...(c.low || []), ...(c.high || [])].filter(
        (v, i) => v !== null && c.x[i % c.x.length] >= first && c.x[i % c.x.length] <= last,
      ),
    );
    let low = Infinity,
      high = -Infinity;
    for (const value of values) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    const log = spec.log && low > 0 && high > 4 * low;
    if (spec.zero) low = Math.min(0, low);
    if (spec.whole) high = Math.max(1, high);
    if (!(high >= low)) [low, high] = [0, 1];
    const room = log ? (high / low) ** 0.04 : 0.04 * (high - low || Math.abs(high) || 1);
    if (log) {
      low /= room;
      high *= room;
    } else {
      high += spec.whole ? 0 : room;
      low -= spec.zero && low === 0 ? 0 : room;
    }
    const place = log ? Math.log : v => v;
    const y = v => bottom - ((bottom - TOP) * (place(v) - place(low))) / (place(high) - place(low));
    const parts = [];
    for (const tick of log ? logTicks(low, high) : ticks(low, high, 5)) {
      const text = spec.percent ? `${Number((100 * tick).toPrecision(3))} %` : short(tick);
      parts.push(
        svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
        svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, text),
      );
    }
    parts.push(...this.frame(), ...this.marks(marks));
    for (const curve of curves) parts.push(...this.lines(curve, y));
    const area = svg(
      "clipPath",
      { id: `clip-${spec.id}` },
      svg("rect", { x: LEFT - 3, y: 0, width: width - LEFT - RIGHT + 6, height: HEIGHT }),
    );
    const picture = svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${HEIGHT}`,
        height: HEIGHT,
        role: "img",
        "aria-label": `${spec.title}, ${curves.map(c => `${c.label} ${said(c.newest)}`)}`,
      },
      area,
      ...parts,
      this.overlay(),
    );
    const several = curves.length > 1 || curves[0].named;
    this.legend.replaceChildren(
      ...curves.map(curve =>
        el("span", {}, ...(several ? [swatch(curve), ` ${curve.label} `] : []), said(curve.newest)),
      ),
    );
    const window = Math.max(1, ...curves.map(c => c.window));
    this.name(
      spec.title,
      [spec.unit, window > 1 ? `mean of ${window} points` : ""].filter(Boolean).join(", "),
    );
    this.node.querySelector("svg[role]")?.remove();
    this.node.append(picture);
    this.listen(picture);
  }

  lines(curve, y) {
    const colour = `k${curve.colour}`,
      clip = `url(#clip-${this.spec.id})`;
    const place = i => this.x(curve.x[i]).toFixed(1);
    // A line ends where a number is missing, and where a launch or a phase begins.
    const pieces = [[]];
    curve.mean.forEach((value, i) => {
      if (value === null || (!curve.dots && curve.cuts.includes(i))) pieces.push([]);
      if (value !== null) pieces.at(-1).push(i);
    });
    const line = (indices, values) =>
      indices.map(i => `${place(i)} ${y(values[i]).toFixed(1)}`).join("L");
    const path = values =>
      pieces.map(piece => (piece.length ? `M${line(piece, values)}` : "")).join("");
    const parts = [];
    if (curve.low)
      for (const piece of pieces.filter(piece => piece.length)) {
        const d = `M${line(piece, curve.high)}L${line(piece.toReversed(), curve.low)}Z`;
        parts.push(svg("path", { class: `band ${colour}`, d, "clip-path": clip }));
      }
    if (curve.line !== curve.mean)
      parts.push(svg("path", { class: `raw ${colour}`, d: path(curve.mean), "clip-path": clip }));
    parts.push(
      svg("path", {
        class: `curve ${colour}`,
        d: path(curve.line),
        "clip-path": clip,
        ...(curve.dash ? { "stroke-dasharray": curve.dash } : {}),
      }),
    );
    if (curve.dots || curve.mean.length <= 50)
      curve.mean.forEach(
        (value, i) =>
          value !== null &&
          parts.push(
            svg("circle", {
              class: colour,
              cx: this.x(curve.x[i]),
              cy: y(value),
              r: 2.2,
              "clip-path": clip,
            }),
          ),
      );
    return parts;
  }

  values(x) {
    const said = this.spec.percent ? percent : number;
    return this.curves
      .filter(c => c.x.length)
      .map(curve => {
        const i = nearest(curve.x, x);
        const range =
          curve.low && curve.low[i] !== curve.high[i]
            ? ` (${said(curve.low[i])} to ${said(curve.high[i])})`
            : "";
        return {
          colour: curve.colour,
          label: curve.label,
          step: curve.step[i],
          x: curve.x[i],
          text: said(curve.mean[i]) + range,
        };
      });
  }
}

function swatch(curve) {
  return svg(
    "svg",
    { viewBox: "0 0 22 8" },
    svg("line", {
      class: `k${curve.colour}`,
      x1: 0,
      x2: 22,
      y1: 4,
      y2: 4,
      "stroke-width": 2.5,
      ...(curve.dash ? { "stroke-dasharray": curve.dash } : {}),
    }),
  );
}

// --- layers -------------------------------------------------------------------------------------

const RAMPS = {
  load: ["#2b1a5a", "#41408f", "#2f6c8e", "#21918c", "#5ac864", "#c9dd2f", "#fff04d"],
  dead: ["#14101f", "#4c1b63", "#8f2a7b", "#d2456b", "#f88a5f", "#fddc9b"],
};

function colour(ramp, share) {
  const at = Math.min(1, Math.max(0, share)) * (ramp.length - 1),
    i = Math.min(ramp.length - 2, Math.floor(at));
  const part = (text, from) => parseInt(text.slice(from, from + 2), 16);
  const mix = [1, 3, 5].map(from =>
    Math.round(part(ramp[i], from) + (part(ramp[i + 1], from) - part(ramp[i], from)) * (at - i)),
  );
  return `rgb(${mix})`;
}

// `layers` is a list of name, x, high, step: one row of cells each, with the first layer on top.
class Layers extends Chart {
  draw(layers, marks) {
    this.layers = layers;
    const width = this.size(),
      ratio = window.devicePixelRatio || 1,
      spec = this.spec;
    const bottom = HEIGHT - BOTTOM,
      row = (bottom - TOP) / layers.length;
    let high = -Infinity,
      low = Infinity;
    const [first, last] = this.shared.domain;
    for (const layer of layers)
      layer.high.forEach((value, i) => {
        if (value === null || layer.x[i] < first || layer.x[i] > last) return;
        high = Math.max(high, value);
        low = Math.min(low, value);
      });
    const base = Math.min(spec.low ?? low, low),
      ramp = RAMPS[spec.ramp || "load"];
    const top = Math.max(high, base + (spec.least ?? 1e-9));
    const canvas = el("canvas", {
      width: Math.round(width * ratio),
      height: Math.round((bottom - TOP) * ratio),
    });
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const pixel = place => Math.round(place * ratio) / ratio; // no seams between cells
    for (const [n, layer] of layers.entries())
      for (let i = 0; i < layer.x.length; i++) {
        if (layer.high[i] === null) continue;
        // A cell reaches half of the way to the records around it.
        const middle = j => pixel(this.x((layer.x[i] + (layer.x[j] ?? layer.x[i])) / 2));
        const left = Math.max(LEFT, middle(i - 1)),
          right = Math.min(width - RIGHT, middle(i + 1));
        if (right < LEFT || left > width - RIGHT) continue;
        pen.fillStyle = colour(ramp, (layer.high[i] - base) / (top - base));
        pen.fillRect(
          left,
          pixel(n * row),
          Math.max(1 / ratio, right - left),
          pixel((n + 1) * row) - pixel(n * row),
        );
      }
    const every = Math.ceil((layers.length * 13) / (bottom - TOP)),
      names = [];
    layers.forEach(
      (layer, n) =>
        n % every ||
        names.push(
          svg(
            "text",
            { x: LEFT - 6, y: TOP + (n + 0.5) * row + 4, "text-anchor": "end" },
            (n ? "" : "layer ") + layer.name,
          ),
        ),
    );
    const image = svg("foreignObject", { x: 0, y: TOP, width, height: bottom - TOP }, canvas);
    const picture = svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${HEIGHT}`,
        height: HEIGHT,
        role: "img",
        "aria-label": `${spec.title}, ${number(low)} to ${number(high)}`,
      },
      image,
      ...names,
      ...this.frame(),
      ...this.marks(marks),
      this.overlay(),
    );
    const key = el("canvas", { width: 90, height: 1 }),
      ink = key.getContext("2d");
    for (let i = 0; i < 90; i++) {
      ink.fillStyle = colour(ramp, i / 89);
      ink.fillRect(i, 0, 1, 1);
    }
    this.legend.replaceChildren(
      el("span", { className: "scale" }, number(base), key, `${number(top)} ${spec.unit || ""}`),
    );
    this.name(spec.title, layers[0]?.of || "");
    this.node.querySelector("svg[role]")?.remove();
    this.node.append(picture);
    this.listen(picture);
  }

  values(x, event) {
    const box = this.node.querySelector("svg[role]").getBoundingClientRect();
    const row = (HEIGHT - BOTTOM - TOP) / this.layers.length;
    const n = Math.floor((event.clientY - box.top - TOP) / row);
    const layer = this.layers[Math.min(this.layers.length - 1, Math.max(0, n))];
    if (!layer) return [];
    const i = nearest(layer.x, x);
    return [
      {
        label: `layer ${layer.name}`,
        step: layer.step[i],
        x: layer.x[i],
        text: number(layer.high[i]),
      },
    ];
  }
}
