"use strict";
// Charts of the page, and which numbers of metrics.jsonl they show.
//
// A curve is `has`, on a scale that may be `log`, begin at `zero` and go to the `whole` of 1. An
// `image` has a row for each layer; its colours begin at `low` and span at least `least`.

const one = key => name => name === key;
const score =
  (...kinds) =>
  name =>
    /^tasks(_ema)?\//.test(name) && kinds.includes(name.split("/").at(-1));

const CHARTS = [
  {
    id: "loss",
    title: "loss",
    unit: "nats a token",
    log: true,
    smooth: true,
    has: name => /^(loss|mtp_loss|valid_loss(\/.*)?)$/.test(name),
  },
  { id: "grad_norm", title: "gradient norm", log: true, smooth: true, has: one("grad_norm") },
  { id: "lr", title: "learning rate", zero: true, has: one("lr") },
  {
    id: "speed",
    title: "tokens/s of a GPU",
    zero: true,
    smooth: true,
    has: one("tokens_per_second_per_gpu"),
  },
  {
    id: "mfu",
    title: "MFU",
    unit: "share of the peak",
    zero: true,
    smooth: true,
    percent: true,
    has: name => name === "mfu" || name === "mfu_fp8",
  },
  {
    id: "tflops",
    title: "TFLOP/s of a GPU",
    zero: true,
    smooth: true,
    has: one("tflops_per_gpu"),
    unless: "mfu",
  },
  {
    id: "load",
    title: "load of the busiest expert by layer",
    image: "load",
    low: 1,
    least: 1,
    unit: "x the mean",
  },
  { id: "dead", title: "dead experts by layer", image: "dead", low: 0, least: 1, ramp: "dead" },
  { id: "max_logit", title: "largest attention logit", has: one("max_logit") },
  { id: "logit", title: "largest attention logit by layer", image: "logit" },
  {
    id: "scores",
    title: "tasks",
    unit: "share that is right",
    percent: true,
    dots: true,
    has: score("acc", "exact_match"),
  },
  {
    id: "bits",
    title: "tasks",
    unit: "bits per byte",
    dots: true,
    has: score("bits_per_byte", "gold_bits_per_byte"),
  },
  {
    id: "goodput",
    title: "goodput",
    unit: "share of the time that trained",
    zero: true,
    whole: true,
    percent: true,
    has: one("goodput"),
  },
];
