"use strict";
// The lines at the top: where each run stands.

function heads() {
  const runs = shown();
  at("heads").replaceChildren(...runs.map((run, i) => head(run, i, runs.length > 1)));
  document.title =
    runs.length === 1 ? `${runs[0].name}, step ${runs[0].state.step}` : "Phalanx runs";
}

function head(run, i, several) {
  const { state } = run,
    passed = (performance.now() - run.heard) / 1000;
  const age = state.age === null ? null : state.age + passed,
    last = name => state.newest[name];
  const late =
    state.phase === "overdue" ||
    (["running", "starting"].includes(state.phase) && age > state.wait);
  const phase = late ? "overdue" : state.phase;
  const facts = [
    [
      "step",
      state.steps
        ? `${state.step.toLocaleString("en")} of ${state.steps.toLocaleString("en")}`
        : state.step.toLocaleString("en"),
    ],
  ];
  if (state.phases.length) facts.push(["phase", state.phases.at(-1)]);
  if (state.tokens) facts.push(["tokens", short(state.tokens)]);
  if ("loss" in state.newest) facts.push(["loss", number(last("loss"))]);
  if (last("tokens_per_second_per_gpu"))
    facts.push([`tokens/s of a ${state.unit}`, number(last("tokens_per_second_per_gpu"))]);
  if (state.eta !== null && !late) facts.push(["ETA", eta(state.eta)]);
  if (state.goodput) facts.push(["goodput", percent(state.goodput)]);
  const told = facts.map(([name, value]) =>
    el("div", {}, el("dt", {}, `${name} `), el("dd", {}, value)),
  );
  if (age !== null)
    told.push(
      el(
        "div",
        { className: late ? "late" : "" },
        late
          ? `no record for ${duration(age)}; ${duration(state.wait)} would be long`
          : `${["ended", "stopped"].includes(phase) ? phase : "last record"} ${duration(age)} ago`,
      ),
    );
  const bar = el("div", { className: "bar" }, el("i"));
  bar.firstChild.style.width = `${Math.min(100, (100 * state.step) / (state.steps || 1))}%`;
  return el(
    "div",
    { className: "head" },
    el(
      "div",
      { className: "row" },
      ...(several ? [el("i", { className: `swatch b${i % COLOURS}` })] : []),
      el("h1", {}, run.name),
      el("span", { className: `phase ${phase}` }, phase),
      el("span", { className: "what" }, state.title.replace(`${run.name}: `, "")),
    ),
    ...(state.steps ? [bar] : []),
    el("dl", { className: "facts" }, ...told),
  );
}

function eta(seconds) {
  const end = new Date(Date.now() + 1000 * seconds),
    soon = seconds < 72000;
  const clock = end.toLocaleTimeString("sv", { hour: "2-digit", minute: "2-digit" });
  return `${duration(seconds)} (${soon ? clock : `${end.toLocaleDateString("sv")} ${clock}`})`;
}
