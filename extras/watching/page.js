"use strict";
// What is new in the chosen runs, every two seconds, and the page that shows it.

const EVERY = 2000,
  COLOURS = 8,
  DASHES = ["", "6 3", "2 3", "9 3 2 3", "1 2"];
const MARKED = new Set([
  "start",
  "restart",
  "phase",
  "checkpoint",
  "skipped",
  "rollback",
  "warning",
  "failure",
  "rerun",
  "stop",
]);
const hiddenKinds = new Set(["kernels"]);
const at = id => document.getElementById(id);

const page = {
  along: "step",
  smooth: true,
  zoom: null,
  runs: new Map(),
  chosen: [],
  known: [],
  busy: false,
  begun: false, // runs have been chosen, be it by default
};
const charts = new Map(); // by their id

const shared = {
  domain: [0, 1],
  ticks: count => (page.along === "time" ? timeTicks : ticks)(...shared.domain, count, 1),
  label: x =>
    page.along === "time"
      ? duration(x)
      : page.along === "tokens"
        ? short(x)
        : x >= 1e4 && x % 1000 === 0
          ? `${(x / 1000).toLocaleString("en")} k`
          : x.toLocaleString("en"),
  hover(chart, x, event) {
    for (const each of charts.values()) each.point(chart ? x : null);
    at("tip").hidden = !chart;
    if (chart) tell(chart.values(x, event), event);
  },
  zoom(low, high) {
    page.zoom = low === null ? null : { low, high, along: page.along };
    again();
  },
};

function tell(values, event) {
  const tip = at("tip");
  if (!values.length) {
    tip.hidden = true;
    return;
  }
  const where = page.along === "step" ? "" : `, ${page.along} ${shared.label(values[0].x)}`;
  tip.replaceChildren(
    el("div", {}, `step ${values[0].step.toLocaleString("en")}${where}`),
    ...values
      .slice(0, 16)
      .map(v =>
        el(
          "div",
          {},
          ...("colour" in v ? [el("i", { className: `swatch b${v.colour}` })] : []),
          v.label,
          el("b", {}, ` ${v.text}`),
        ),
      ),
  );
  const box = tip.getBoundingClientRect(),
    right = event.clientX + 14 + box.width > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - 14 - box.width : event.clientX + 14)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4))}px`;
}

function shown() {
  return page.chosen.map(name => page.runs.get(name)).filter(run => run?.state);
}

function again() {
  for (const run of page.runs.values()) run.forget();
  at("whole").hidden = !page.zoom;
  poll();
}

function labelled(run, name, several) {
  const parts = name.split("/");
  let label =
    { loss: "training", valid_loss: "validation", mtp_loss: "multi-token prediction" }[name] ||
    name;
  if (parts[0] === "valid_loss" && parts.length > 1) label = parts.slice(1).join("/");
  if (/^tasks/.test(name)) label = parts[1] + (parts[0] === "tasks_ema" ? ", averages" : "");
  return several ? `${run.name}: ${label}` : label;
}

function curvesOf(spec, runs) {
  const several = runs.length > 1,
    curves = [];
  runs.forEach((run, i) => {
    const depth = name => name.split("/").length;
    const names = Object.keys(run.series)
      .filter(spec.has)
      .sort((a, b) => depth(a) - depth(b) || (a < b ? -1 : 1));
    const subjects = [...new Set(names.map(name => (spec.dots ? name.split("/")[1] : name)))];
    names.forEach(name => {
      const j = subjects.indexOf(spec.dots ? name.split("/")[1] : name);
      const points = run.series[name];
      if (!points.step?.length) return;
      const begins = run.events.filter(e => ["start", "restart", "phase"].includes(e.kind));
      const cuts = [...new Set(begins.map(e => points.step.findIndex(step => step > e.step)))];
      curves.push({
        ...points,
        x: points.step.map(step => run.position(step, page.along)),
        cuts: cuts.filter(i => i > 0).sort((a, b) => a - b),
        newest: page.zoom ? points.mean.at(-1) : (run.state.newest[name] ?? null),
        label:
          names.length > 1 || spec.dots
            ? labelled(run, name, several)
            : several
              ? run.name
              : spec.title,
        colour: (several ? i : j) % COLOURS,
        dash: several ? DASHES[j % DASHES.length] : name.startsWith("tasks_ema/") ? "6 3" : "",
        named: several || spec.dots,
        dots: spec.dots || name.startsWith("valid_loss"),
      });
    });
  });
  return curves;
}

function marksOf(runs) {
  const marks = [];
  for (const run of runs)
    for (const event of eventsOf(run)) {
      const x = run.position(event.step, page.along);
      if (
        MARKED.has(event.kind) &&
        !hiddenKinds.has(event.kind) &&
        x !== null &&
        x >= shared.domain[0] &&
        x <= shared.domain[1]
      )
        marks.push({ x, kind: event.kind, text: `step ${event.step}: ${event.text}` });
    }
  return marks;
}

function eventsOf(run) {
  const failed = run.failures.map(event => ({
    ...event,
    step: Math.round(run.stepOf(event.time) ?? 0),
  }));
  return [...run.events, ...failed];
}

function domain(runs) {
  if (page.zoom) return [page.zoom.low, page.zoom.high];
  const ends = runs.flatMap(run =>
    run.axis.step.length
      ? [run.axis.step[0], run.axis.step.at(-1)].map(step => run.position(step, page.along))
      : [],
  );
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

function chart(spec, into) {
  if (!charts.has(spec.id)) charts.set(spec.id, new (spec.image ? Layers : Curves)(spec, shared));
  const found = charts.get(spec.id);
  if (found.node.parentNode !== into) into.append(found.node);
  return found;
}

function draw() {
  const runs = shown();
  shared.domain = domain(runs);
  const marks = marksOf(runs),
    wanted = new Set(),
    grid = at("charts");
  const unit = runs.every(run => run.state.unit === "rank") ? "rank" : "GPU";
  for (const spec of CHARTS) {
    spec.title = spec.title.replace(/of a (GPU|rank)/, `of a ${unit}`);
    if (spec.image)
      runs.forEach((run, i) => {
        const { step, ...lines } = run.images[spec.image] || {};
        if (!step?.length) return;
        const x = step.map(each => run.position(each, page.along));
        const layers = Object.entries(lines).map(([name, high]) => ({
          name,
          high,
          step,
          x,
          of: runs.length > 1 ? run.name : "",
        }));
        const own = { ...spec, id: runs.length > 1 ? `${spec.id}-${i}` : spec.id };
        wanted.add(own.id);
        chart(own, grid).draw(layers, marksOf([run]));
      });
    else if (!(spec.unless && wanted.has(spec.unless))) {
      const curves = curvesOf(spec, runs);
      if (!curves.length) continue;
      wanted.add(spec.id);
      chart(spec, grid).draw(curves, marks, page.smooth);
    }
  }
  drawOthers(runs, marks, wanted);
  for (const [id, each] of charts)
    if (!wanted.has(id)) {
      each.node.remove();
      charts.delete(id);
    }
  shares(runs, grid);
  const begun = runs.some(run => run.axis.step.length);
  at("empty").hidden = begun;
  at("empty").textContent = !page.known.length
    ? "no run here yet"
    : !page.chosen.length
      ? "choose a run"
      : "no step yet: the page fills as soon as there is one";
  list(runs);
}

function drawOthers(runs, marks, wanted) {
  const taken = name => CHARTS.some(spec => spec.has?.(name)) || name === "tflops_per_gpu";
  const names = [...new Set(runs.flatMap(run => Object.keys(run.series)))]
    .filter(name => !taken(name))
    .sort();
  at("others").hidden = !names.length;
  at("others").firstElementChild.textContent = `other numbers (${names.length})`;
  if (!at("others").open) return;
  for (const name of names) {
    const spec = { id: `other-${name.replace(/\W/g, "_")}`, title: name, has: one(name) };
    const curves = curvesOf(spec, runs);
    if (!curves.length) continue;
    wanted.add(spec.id);
    chart(spec, at("others").lastElementChild).draw(curves, marks, false);
  }
}

// Where the time went: one bar for each run.
function shares(runs, grid) {
  at("chart-time")?.remove();
  const timed = runs.filter(run => Object.values(run.state.seconds).some(Boolean));
  if (!timed.length) return;
  const node = el(
    "figure",
    { className: "chart", id: "chart-time" },
    el("h2", {}, "where the time went"),
  );
  for (const run of timed) {
    const parts = Object.entries(run.state.seconds).filter(([, seconds]) => seconds > 0);
    const all = parts.reduce((sum, [, seconds]) => sum + seconds, 0),
      bar = el("div", { className: "shares" });
    const listed = el("div", { className: "parts" });
    const order = ([a, x], [b, y]) =>
      (b === run.state.training) - (a === run.state.training) || y - x;
    parts.sort(order).forEach(([kind, seconds], i) => {
      const colour = kind === run.state.training ? 2 : [1, 0, 3, 4, 5, 6, 7][(i - 1) % 7];
      const piece = el("i", { className: `b${colour}`, title: `${kind} ${duration(seconds)}` });
      piece.style.width = `${(100 * seconds) / all}%`;
      bar.append(piece);
      listed.append(
        el(
          "span",
          {},
          el("i", { className: `swatch b${colour}` }),
          `${kind} `,
          el("b", {}, `${duration(seconds)}, ${percent(seconds / all)}`),
        ),
      );
    });
    if (timed.length > 1) node.append(el("div", { className: "legend" }, run.name));
    node.append(bar, listed);
  }
  grid.append(node);
}

function list(runs) {
  const rows = runs.flatMap(run => eventsOf(run).map((event, i) => ({ ...event, run, i })));
  rows.sort((a, b) => (b.time ?? 0) - (a.time ?? 0) || b.i - a.i);
  at("happened").hidden = !rows.length;
  const counts = new Map();
  for (const { kind } of rows) counts.set(kind, (counts.get(kind) || 0) + 1);
  at("kinds").replaceChildren(
    ...[...counts].map(([kind, count]) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": String(!hiddenKinds.has(kind)),
          onclick: () => {
            hiddenKinds.has(kind) ? hiddenKinds.delete(kind) : hiddenKinds.add(kind);
            draw();
          },
        },
        `${kind} ${count}`,
      ),
    ),
  );
  const visible = rows.filter(row => !hiddenKinds.has(row.kind)).slice(0, 500);
  at("events").replaceChildren(
    ...visible.map(row =>
      el(
        "li",
        {},
        el("time", {}, row.time ? new Date(1000 * row.time).toLocaleString("sv") : ""),
        el("span", { className: "at" }, `step ${row.step.toLocaleString("en")}`),
        el("span", { className: `of ${row.kind === "phase" ? "phase-mark" : row.kind}` }, row.kind),
        el(
          "span",
          { className: "text" },
          runs.length > 1 ? `${row.run.name}: ${row.text}` : row.text,
        ),
      ),
    ),
  );
}

// --- which runs ---------------------------------------------------------------------------------

function choices() {
  at("choose").hidden = page.known.length < 2;
  at("choose").firstElementChild.textContent =
    `runs: ${page.chosen.length} of ${page.known.length}`;
  at("runs").replaceChildren(
    ...page.known.map(run =>
      el(
        "label",
        {},
        el("input", {
          type: "checkbox",
          checked: page.chosen.includes(run.name),
          onchange: event => {
            const others = page.chosen.filter(name => name !== run.name);
            choose(event.target.checked ? [...others, run.name] : others);
          },
        }),
        run.name,
        el(
          "small",
          {},
          run.time ? `  ${new Date(1000 * run.time).toLocaleString("sv")}` : "  not begun",
        ),
      ),
    ),
  );
}

function choose(names) {
  page.chosen = names;
  page.zoom = null;
  for (const name of [...page.runs.keys()]) if (!names.includes(name)) page.runs.delete(name);
  for (const name of names) if (!page.runs.has(name)) page.runs.set(name, new Run(name));
  remember();
  choices();
  again();
}

// The address has the view, so that it stays after a reload.
function remember() {
  const view = new URLSearchParams({ along: page.along });
  for (const name of page.chosen) view.append("run", name);
  history.replaceState(null, "", `#${view}`);
}

async function known() {
  const reply = await (await fetch("runs")).json();
  page.known = reply.runs;
  const names = new Set(page.known.map(run => run.name));
  const left = page.chosen.filter(name => names.has(name)); // others have been removed
  if (left.length < page.chosen.length) {
    page.begun = left.length > 0;
    choose(left);
  }
  if (!page.begun) {
    const asked = new URLSearchParams(location.hash.slice(1)).getAll("run");
    const before = asked.filter(name => names.has(name));
    const first = page.known.filter(run => run.chosen).map(run => run.name);
    page.begun = before.length + first.length > 0;
    if (page.begun) choose(before.length ? before : first);
  }
  choices();
}

// --- time ---------------------------------------------------------------------------------------

let turn = 0;
async function poll() {
  if (page.busy) {
    page.pending = true;
    return;
  }
  page.busy = true;
  try {
    if (turn++ % 5 === 0 || !page.known.length) await known();
    const news = await Promise.all([...page.runs.values()].map(run => run.ask(page.zoom)));
    at("trouble").hidden = true;
    if (news.some(Boolean) || page.dirty !== false) {
      page.dirty = false;
      draw();
    }
    heads();
  } catch (error) {
    turn = 0; // a run may have been removed, and others have news
    page.dirty = true;
    at("trouble").hidden = false;
    at("trouble").textContent =
      error instanceof TypeError
        ? "watch.py does not answer; this page tries again"
        : error.message;
  }
  page.busy = false;
  if (page.pending) {
    page.pending = false;
    page.dirty = true;
    poll();
  }
}

const view = new URLSearchParams(location.hash.slice(1)).get("along");
if (["step", "tokens", "time"].includes(view)) page.along = view;
for (const input of document.querySelectorAll("[name=axis]")) {
  input.checked = input.value === page.along;
  input.onchange = () => {
    page.along = input.value;
    remember();
    const zoomed = page.zoom;
    page.zoom = null;
    zoomed ? again() : draw();
  };
}
at("smooth").onchange = event => {
  page.smooth = event.target.checked;
  draw();
};
at("whole").onclick = () => shared.zoom(null);
at("others").ontoggle = draw;
addEventListener("resize", draw);
addEventListener("pointerdown", event => event.target.closest(".chart") || shared.hover(null));
document.addEventListener("visibilitychange", () => document.hidden || poll());
setInterval(() => document.hidden || poll(), EVERY);
setInterval(() => document.hidden || heads(), 1000);
poll();
